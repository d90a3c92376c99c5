"""A small two-modality model, and a `ModelGraph` built from it by hand: passes are tested without capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import fx, nn

from mmcompile.ir.graph import (
    META_KEY,
    CaptureMode,
    Component,
    ComponentKind,
    Layer,
    LossInfo,
    ModelGraph,
    NodeInfo,
    ParameterSpec,
    dtype_name,
)
from mmcompile.ir.tensor_spec import TensorSpec

WIDTH = 16
PLACES = {
    "vision.patches": ("vision", 0),
    "vision.blocks.0": ("vision", 1),
    "vision.blocks.1": ("vision", 2),
    "audio": ("audio", 0),
    "projector": ("projector", 0),
    "embed": ("language_model", 0),
    "merge": ("language_model", 0),
    "layers.0": ("language_model", 1),
    "layers.1": ("language_model", 2),
    "head": ("language_model", 3),
}
KINDS = {
    "vision": ComponentKind.ENCODER,
    "audio": ComponentKind.ENCODER,
    "projector": ComponentKind.PROJECTOR,
    "language_model": ComponentKind.LANGUAGE_MODEL,
}
PARTS: tuple[str, ...] = ("encoder", "projector", "language_model", "adapter")


class Adapter(nn.Module):
    """A low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(hidden))


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, *, causal: bool, adapter: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.causal = causal
        if adapter:
            self.adapter = Adapter()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        q, k, v = (part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in self.qkv(normed).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(mixed)
        if "adapter" in self._modules:
            hidden = hidden + self.adapter(normed)
        return hidden + self.down(F.silu(self.gate(hidden)))


class Vision(nn.Module):
    """Patch embedding by convolution, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(pixels)
        for block in self.blocks:
            hidden = block(hidden.flatten(2).transpose(1, 2) if hidden.dim() == 4 else hidden)
        return hidden


class Audio(nn.Module):
    """A strided convolution over mel frames."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, WIDTH, 3, stride=2, padding=1)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.conv(mels)).transpose(1, 2)


class Merge(nn.Module):
    """Features into placeholder positions: token 1 is an image, token 2 a sound."""

    def forward(
        self, embeds: torch.Tensor, ids: torch.Tensor, image: torch.Tensor, sound: torch.Tensor
    ) -> torch.Tensor:
        embeds = embeds.masked_scatter((ids == 1).unsqueeze(-1).expand_as(embeds), image)
        return embeds.masked_scatter((ids == 2).unsqueeze(-1).expand_as(embeds), sound)


class Head(nn.Module):
    """Logits and mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, 11, bias=False)
        self.spare = nn.Linear(2, 1, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(self.norm(hidden)).flatten(0, 1), labels.flatten())


class SmallModel(nn.Module):
    """Image and sound into one language model; an adapter in its first layer, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.audio = Audio()
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Embedding(11, WIDTH)
        self.merge = Merge()
        self.layers = nn.ModuleList([Block(causal=True, adapter=True), Block(causal=True)])
        self.head = Head()

    def forward(
        self, input_ids: torch.Tensor, pixels: torch.Tensor, mels: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        features = self.projector(self.vision(pixels))
        hidden = self.merge(self.embed(input_ids), input_ids, features, self.audio(mels))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden, labels)


def small_batch() -> dict[str, torch.Tensor]:
    """Two samples, each of four image tokens, three sound tokens and two words."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 5, 6], [7, 1, 1, 1, 1, 2, 2, 2, 8]])
    return {
        "input_ids": ids,
        "pixels": torch.randn(2, 3, 8, 8, generator=generator),
        "mels": torch.randn(2, 4, 6, generator=generator),
        "labels": ids,
    }


def set_trainable(model: nn.Module, pattern: Mapping[str, bool]) -> None:
    """Freeze by name: the adapter apart from the layer it sits in; audio goes with the encoder."""
    parts = {"vision": "encoder", "audio": "encoder", "projector": "projector"}
    for name, parameter in model.named_parameters():
        part = "adapter" if ".adapter." in name else parts.get(name.split(".")[0], "language_model")
        parameter.requires_grad_(pattern[part])


def build_graph(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    places: Mapping[str, tuple[str, int]] = PLACES,
    *,
    per_token: bool = False,
) -> ModelGraph:
    """Export `model` and annotate: a node belongs to the longest prefix in `places` of its module path."""
    module = torch.export.export(model, (), dict(batch), strict=False).module()
    _clean(module)
    floating: dict[fx.Node, bool] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            floating[node] = node.meta["val"].is_floating_point()
        elif node.op == "get_attr":
            floating[node] = node.target in dict(model.named_parameters(remove_duplicate=False))
        elif node.op == "call_function":
            floating[node] = any(floating[source] for source in node.all_input_nodes)
            node.meta[META_KEY] = _node_info(node, places, shared=not floating[node])
    return ModelGraph(
        name=type(model).__name__,
        module=module,
        components=_components(model, places),
        edges=_edges(module.graph),
        inputs=tuple(
            TensorSpec(name=name, shape=tuple(value.shape), dtype=dtype_name(value.dtype))
            for name, value in batch.items()
        ),
        parameters=_parameter_specs(model),
        buffers=tuple(name for name, _ in model.named_buffers()),
        loss=LossInfo(per_token=per_token),
        mode=CaptureMode.BUCKET,
    )


def _clean(module: fx.GraphModule) -> None:
    """No guards, nothing in place: what capture promises."""
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            module.graph.erase_node(node)
        elif node.target is torch.ops.aten.detach_.default:
            node.target = torch.ops.aten.detach.default
    module.recompile()


def _node_info(node: fx.Node, places: Mapping[str, tuple[str, int]], *, shared: bool) -> NodeInfo:
    path = next(reversed(node.meta["nn_module_stack"].values()))[0] if node.meta.get("nn_module_stack") else ""
    prefixes = [prefix for prefix in places if path == prefix or path.startswith(f"{prefix}.")]
    prefix = max(prefixes, key=len) if prefixes else _by_inputs(path, places)
    component, layer = places[prefix]
    return NodeInfo(component=None if shared else component, layer=0 if shared else layer, module_path=path)


def _by_inputs(path: str, places: Mapping[str, tuple[str, int]]) -> str:
    """A node of a container (`vision`): the first layer below it."""
    return next((prefix for prefix in places if prefix.startswith(f"{path}.")), next(iter(places)))


def _components(model: nn.Module, places: Mapping[str, tuple[str, int]]) -> tuple[Component, ...]:
    layers: dict[str, dict[int, list[str]]] = {}
    for prefix, (component, index) in places.items():
        layers.setdefault(component, {}).setdefault(index, []).append(prefix)
    names = [name for name, _ in model.named_parameters()]

    def layer(index: int, prefixes: list[str]) -> Layer:
        own = tuple(name for name in names if any(name.startswith(f"{prefix}.") for prefix in prefixes))
        return Layer(index=index, name=prefixes[0], parameters=own)

    return tuple(
        Component(
            name=name,
            kind=KINDS[name],
            sources=(),
            modules=tuple(prefix for prefix, (component, _) in places.items() if component == name),
            layers=tuple(layer(index, prefixes) for index, prefixes in sorted(by_index.items())),
        )
        for name, by_index in layers.items()
    )


def _edges(graph: fx.Graph) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    edges: dict[tuple[str, str], dict[str, None]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes if node.op == "call_function" else ():
            if source.op == "call_function":
                producer, consumer = source.meta[META_KEY].component, node.meta[META_KEY].component
                if producer and consumer and producer != consumer:
                    edges.setdefault((producer, consumer), {})[source.name] = None
    return tuple((producer, consumer, tuple(names)) for (producer, consumer), names in edges.items())


def _parameter_specs(model: nn.Module) -> tuple[ParameterSpec, ...]:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return tuple(
        ParameterSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            trainable=parameter.requires_grad,
            aliases=tuple(aliases[id(parameter)][1:]),
        )
        for name, parameter in model.named_parameters()
    )


def with_flags(graph: ModelGraph, model: nn.Module) -> ModelGraph:
    """The same graph with the model's present `requires_grad` flags."""
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return replace(graph, parameters=tuple(replace(spec, trainable=flags[spec.name]) for spec in graph.parameters))


def small_graph() -> ModelGraph:
    """A fresh graph of a fresh `SmallModel`, everything trainable."""
    torch.manual_seed(0)
    return build_graph(SmallModel(), small_batch())
