"""Components, layers and edges found from structure alone, in models of different build."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.graphs.split import captured
from torch import Tensor, nn
from zoo import ALL, samples

from mmcompile.data.collate import collate
from mmcompile.ir.capture import capture
from mmcompile.ir.components import INPUTS, OUTPUTS
from mmcompile.ir.graph import ModelGraph, info

Parts = dict[str, tuple[str, int]]
"""Component -> kind and number of layers, in order."""
Edges = set[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a family consists of."""

    parts: Parts
    edges: Edges


def _line(*names: str) -> Edges:
    return set(zip(names, names[1:], strict=False))


EXPECTED = {
    "llava": Expected(
        parts={
            "vision_tower": ("encoder", 5),
            "multi_modal_projector": ("projector", 1),
            "language_model": ("language_model", 6),
        },
        edges=_line("vision_tower", "multi_modal_projector", "language_model"),
    ),
    "qwen3_vl": Expected(
        parts={"visual": ("encoder", 8), "language_model": ("language_model", 6)},
        edges=_line("visual", "language_model"),
    ),
    "mllama": Expected(  # cross-attention
        parts={
            "vision_model": ("encoder", 8),
            "multi_modal_projector": ("projector", 1),
            "language_model": ("language_model", 6),
        },
        edges=_line("vision_model", "multi_modal_projector", "language_model"),
    ),
    "two_encoder_net": Expected(
        parts={
            "vision": ("encoder", 6),
            "vision_projector": ("projector", 4),
            "hearing": ("encoder", 4),
            "hearing_projector": ("projector", 1),
            "language_model": ("language_model", 6),
        },
        edges=_line("vision", "vision_projector", "language_model")
        | _line("hearing", "hearing_projector", "language_model"),
    ),
    "text_chain": Expected(parts={"language_model": ("language_model", 10)}, edges=set()),
    "whisper": Expected(  # encoder-decoder
        parts={"encoder": ("encoder", 4), "language_model": ("language_model", 4)},
        edges=_line("encoder", "language_model"),
    ),
    "clip": Expected(  # two towers and a contrastive loss
        parts={
            "vision_model": ("encoder", 6),
            "visual_projection": ("projector", 1),
            "text_model": ("encoder", 6),
            "text_projection": ("projector", 1),
            "language_model": ("language_model", 1),
        },
        edges=_line("vision_model", "visual_projection", "language_model")
        | _line("text_model", "text_projection", "language_model"),
    ),
    "qwen2_5_vl": Expected(
        parts={"visual": ("encoder", 6), "language_model": ("language_model", 6)},
        edges=_line("visual", "language_model"),
    ),
    "blip2": Expected(
        parts={
            "vision_model": ("encoder", 6),
            "qformer": ("projector", 3),
            "language_projection": ("projector", 1),
            "language_model": ("language_model", 6),
        },
        edges=_line("vision_model", "qformer", "language_projection", "language_model"),
    ),
    "instructblip": Expected(  # the Q-Former reads text too
        parts={
            "vision_model": ("encoder", 6),
            "qformer": ("projector", 4),
            "language_projection": ("projector", 1),
            "language_model": ("language_model", 6),
        },
        edges=_line("vision_model", "qformer", "language_projection", "language_model"),
    ),
    "qwen2_5_omni": Expected(
        parts={
            "audio_tower": ("encoder", 4),
            "visual": ("encoder", 6),
            "language_model": ("language_model", 6),
        },
        edges=_line("audio_tower", "language_model") | _line("visual", "language_model"),
    ),
    "florence2": Expected(  # a text encoder-decoder behind the image encoder
        parts={
            "vision_tower": ("encoder", 9),
            "multi_modal_projector": ("projector", 1),
            "language_model": ("language_model", 6),
        },
        edges=_line("vision_tower", "multi_modal_projector", "language_model"),
    ),
    "video_llava": Expected(  # two towers share one projector
        parts={
            "image_tower": ("encoder", 5),
            "multi_modal_projector": ("projector", 1),
            "video_tower": ("encoder", 4),
            "language_model": ("language_model", 6),
        },
        edges=_line("image_tower", "multi_modal_projector", "language_model")
        | _line("video_tower", "multi_modal_projector"),
    ),
}
QUICK = ("llava", "qwen3_vl", "mllama", "two_encoder_net", "text_chain", "whisper", "clip")
# Qwen2.5-Omni keeps a tensor of one forward for generation; export remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXPECTED]


@functools.cache
def _graph(name: str) -> ModelGraph:
    if name in ("llava", "qwen3_vl", "mllama", "two_encoder_net"):
        return captured(name)[2].graph
    return capture(ALL[name].build(), ALL[name].batch()).graph


@pytest.mark.parametrize("name", EVERY)
def test_components_and_edges(name: str) -> None:
    graph = _graph(name)
    found = {c.name: (str(c.kind), len(c.layers)) for c in graph.components}
    assert found == EXPECTED[name].parts
    assert list(found)[-1] == "language_model"
    assert {(producer, consumer) for producer, consumer, _ in graph.edges} == EXPECTED[name].edges
    assert graph.loss_component == "language_model"


@pytest.mark.parametrize("name", EVERY)
def test_no_edge_goes_from_a_later_layer_to_an_earlier_one(name: str) -> None:
    graph = _graph(name)
    used: dict[str, set[int]] = defaultdict(set)
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        mine = info(node)
        if mine.shared:
            assert all(info(source).shared for source in node.all_input_nodes if source.op == "call_function")
            continue
        used[str(mine.component)].add(mine.layer)
        for source in node.all_input_nodes:
            if source.op == "call_function" and info(source).component == mine.component:
                assert info(source).layer <= mine.layer, f"{node} reads {source}"
    assert used == {c.name: set(range(len(c.layers))) for c in graph.components}


@pytest.mark.parametrize("name", EVERY)
def test_layers_own_the_parameters_their_nodes_read_and_blocks_are_named(name: str) -> None:
    graph = _graph(name)
    read: dict[tuple[str, int], set[str]] = defaultdict(set)
    own = {spec.name for spec in graph.parameters}
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and not info(node).shared:
            tensors = {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
            read[str(info(node).component), info(node).layer] |= tensors & own
    for component in graph.components:
        assert [layer.index for layer in component.layers] == list(range(len(component.layers)))
        assert len({layer.name for layer in component.layers}) == len(component.layers)
        for layer in component.layers:
            assert set(layer.parameters) == read[component.name, layer.index]
            if layer.name.rpartition(".")[2].isdigit() and layer.parameters:
                assert layer.name not in (INPUTS, OUTPUTS)
                assert any(p.startswith(f"{layer.name}.") for p in layer.parameters), layer


@pytest.mark.parametrize("name", EVERY)
def test_edges_name_the_tensors_that_flow(name: str) -> None:
    graph = _graph(name)
    nodes = {node.name: node for node in graph.module.graph.nodes}
    for producer, consumer, tensors in graph.edges:
        assert tensors
        for tensor in tensors:
            assert info(nodes[tensor]).component == producer
            readers = [user for user in nodes[tensor].users if user.op == "call_function"]
            assert consumer in {info(user).component for user in readers}


def test_a_reference_keeps_components_and_layer_order_without_media() -> None:
    """Text alone passes through no encoder; the layers that work are still those the plan places."""
    model, _, first = captured("two_encoder_net")
    text = ALL["two_encoder_net"].text_only_batch(torch.float64)
    again = capture(model, text, reference=first.graph.components).graph
    assert again.components == (first.graph.component("language_model"),)
    places = {name: (c.name, layer.index) for c in again.components for layer in c.layers for name in layer.parameters}
    for node in again.module.graph.nodes:
        if node.op == "call_function" and not info(node).shared:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and str(source.target) in places:
                    assert places[str(source.target)] == (info(node).component, info(node).layer)
    assert capture(model, text).graph.components != again.components, "without a reference nothing is kept"


class _Skipping(nn.Module):
    """Its Python leaves out the last layer, or runs the first one twice with an op of its own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 8)

    def forward(self, input_ids: Tensor, ways: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.layers[0](self.embed(input_ids))
        if ways.sum() == 1:
            hidden = self.layers[0](hidden * 2)
        if ways.sum() == 2:
            hidden = self.layers[1](hidden)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def _ways(number: int) -> dict[str, Tensor]:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return {"input_ids": ids, "ways": torch.tensor([number]), "labels": ids}


def test_sizes_that_inputs_share_are_of_none_of_them() -> None:
    """Mllama looks ids up that it expands by the number of samples, which may be read from what belongs to the text."""
    family = ALL["mllama"]
    model, batch = family.build(torch.float32), collate(samples(family, 2, seed=0))
    fixed = capture(model, batch).graph
    varying = {name: {0} for name, value in batch.items() if isinstance(value, Tensor)}
    symbolic = capture(model, batch, varying=varying, reference=fixed.components).graph
    assert symbolic.edges == fixed.edges


def test_a_batch_that_skips_the_last_block_leaves_the_head_where_it_is() -> None:
    model = _Skipping()
    first = capture(model, _ways(2)).graph
    again = capture(model, _ways(0), reference=first.components).graph
    (head,) = (n for n in again.module.graph.nodes if n.op == "call_function" and info(n).module_path == "head")
    assert first.components[0].layers[info(head).layer].name == "head"


def test_an_op_between_two_runs_of_the_last_block_does_not_come_after_it() -> None:
    graph = capture(_Skipping(), _ways(1)).graph
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and not info(node).shared:
            for source in node.all_input_nodes:
                if source.op == "call_function" and not info(source).shared:
                    assert info(source).layer <= info(node).layer


def _blocks(width: int, count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


class _Pool(nn.Module):
    """A module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).mean(2)


class _Text(nn.Module):
    """A language model whose own encoder sees images: word embeddings, a tower, a projection, blocks behind the merge."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"patches": nn.Linear(6, 4), "blocks": _blocks(4), "norm": nn.LayerNorm(4)})
        self.projection = nn.Linear(4, 4)
        self.words = nn.Embedding(8, 4)
        self.blocks = _blocks(4)

    def forward(self, input_ids: Tensor, pixels: Tensor) -> Tensor:
        tower = self.tower
        seen = self.projection(tower["norm"](tower["blocks"](tower["patches"](pixels))))
        return self.blocks(torch.cat([self.words(input_ids), seen], 1))


class _Parts(nn.Module):
    """Calls the parts that a test gives it, and ends in blocks and a loss over all that they return."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.blocks = _blocks(4)
        self.head = nn.Linear(4, 8)

    def loss(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.blocks(hidden))
        return {"loss": F.cross_entropy(logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten())}


class _Pooled(_Parts):
    def forward(self, input_ids: Tensor, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        parts = self.parts
        seen = parts["projector"](parts["pool"](parts["tower"](pixels)))
        return self.loss(torch.cat([parts["words"](input_ids), seen], 1), labels)


class _Nested(_Parts):
    def forward(self, input_ids: Tensor, pixels: Tensor, answer: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen = self.parts["text"](input_ids, pixels)
        return self.loss(torch.cat([self.parts["words"](answer), seen], 1), labels)


class _Pieces(_Parts):
    """A convolution in front of the tower and a norm behind it, and a neck of two projections, none in a module of its own."""

    def forward(self, input_ids: Tensor, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        parts = self.parts
        seen = parts["norm"](parts["tower"](parts["patches"](pixels)))
        seen = parts["second"](parts["first"](seen).relu())
        return self.loss(torch.cat([parts["words"](input_ids), seen], 1), labels)


class _Codes(_Parts):
    def forward(self, codes: Tensor, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        tables: Any = self.parts["tables"]
        heard: Any = sum(table(codes[..., place]) for place, table in enumerate(tables))
        return self.loss(torch.cat([heard, self.parts["tower"](pixels)], 1), labels)


class _Towers(_Parts):
    """Two towers in one module, and labels that are floats, which the loss alone reads."""

    def forward(self, input_ids: Tensor, pixels: Tensor, target: Tensor) -> dict[str, Tensor]:
        seen, read = self.parts["both"](pixels, input_ids)
        return {"loss": F.mse_loss(self.head(self.blocks(torch.cat([read, seen], 1))), target)}


class _Ears(_Parts):
    """Two towers over halves of the same scaled sounds, and noise that is drawn once for both if there is any."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__(words=nn.Embedding(8, 4), left=_blocks(4), right=_blocks(4))
        self.noise = noise

    def forward(self, input_ids: Tensor, sounds: Tensor, labels: Tensor) -> dict[str, Tensor]:
        sounds = sounds + self.noise * torch.randn_like(sounds) if self.noise else sounds
        first, second = (sounds * 2).split(4, -1)
        heard = self.parts["left"](first), self.parts["right"](first + second)
        return self.loss(torch.cat([self.parts["words"](input_ids), *heard], 1), labels)


class _Counted(_Ears):
    """The statistics of a norm without parameters, over what both towers hear, change once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, input_ids: Tensor, sounds: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(input_ids, self.norm(sounds), labels)


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seeing = _blocks(4)
        self.reading = nn.Sequential(nn.Embedding(8, 4), _blocks(4))

    def forward(self, pixels: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.seeing(pixels), self.reading(input_ids)


_IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
_PIXELS = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "batch", "parts"),
    [
        pytest.param(
            lambda: _Pooled(tower=_blocks(4), pool=_Pool(), projector=nn.Linear(4, 4), words=nn.Embedding(8, 4)),
            {"input_ids": _IDS, "pixels": _PIXELS, "labels": _IDS},
            "tower>projector>language_model",
            id="a module without parameters in front of the projector",
        ),
        pytest.param(
            lambda: _Nested(text=_Text(), words=nn.Embedding(8, 4)),
            {"input_ids": _IDS, "pixels": torch.randn(2, 4, 6), "answer": _IDS, "labels": _IDS},
            "tower>projection>text>language_model",
            id="a tower inside another encoder",
        ),
        pytest.param(
            lambda: _Pieces(
                patches=nn.Linear(4, 4),
                tower=_blocks(4),
                norm=nn.LayerNorm(4),
                first=nn.Linear(4, 4),
                second=nn.Linear(4, 4),
                words=nn.Embedding(8, 4),
            ),
            {"input_ids": _IDS, "pixels": _PIXELS, "labels": _IDS},
            "tower>first>language_model",
            id="lone layers join their neighbours",
        ),
        pytest.param(
            lambda: _Codes(tables=nn.ModuleList(nn.Embedding(8, 4) for _ in range(2)), tower=_blocks(4)),
            {"codes": torch.stack([_IDS, _IDS], -1), "pixels": _PIXELS, "labels": _IDS},
            "tower>language_model",
            id="tables of codes are no encoder",
        ),
        pytest.param(
            lambda: _Towers(both=_Both()),
            {"input_ids": _IDS, "pixels": _PIXELS, "target": torch.randn(2, 7, 8)},
            "seeing>language_model, reading>language_model",
            id="two towers in one module",
        ),
        pytest.param(
            _Ears,
            {"input_ids": _IDS, "sounds": torch.randn(2, 4, 8), "labels": _IDS},
            "left>language_model, right>language_model",
            id="what two towers compute from inputs alone is computed by both",
        ),
        pytest.param(
            lambda: _Ears(noise=0.1),
            {"input_ids": _IDS, "sounds": torch.randn(2, 4, 8), "labels": _IDS},
            "left>right>language_model, left>language_model",
            id="noise that two towers share is drawn once",
        ),
        pytest.param(
            _Counted,
            {"input_ids": _IDS, "sounds": torch.randn(2, 4, 8), "labels": _IDS},
            "left>right>language_model, left>language_model",
            id="statistics of what two towers share are taken once",
        ),
    ],
)
def test_components_of_small_models(model: Callable[[], nn.Module], batch: dict[str, Tensor], parts: str) -> None:
    graph = capture(model(), batch).graph
    edges = {pair for line in parts.split(", ") for pair in pairwise(line.split(">"))}
    assert {(producer, consumer) for producer, consumer, _ in graph.edges} == edges
    assert {c.name for c in graph.components} == {name for pair in edges for name in pair}
