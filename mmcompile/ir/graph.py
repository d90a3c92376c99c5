"""`ModelGraph`: a model's training step as one annotated FX graph, cut into components and layers.

The graph is in ATen-with-composites form (linear, layer_norm and scaled_dot_product_attention stay whole).
`call_function` nodes carry one `NodeInfo` in `node.meta["mmcompile"]`; nothing else of ours lives in node metadata.
Parameters and buffers are `get_attr` nodes whose targets are the model's own names.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import networkx as nx
import torch
from torch import fx

from mmcompile.errors import ConfigError
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.ir.tensor_spec import TensorSpec

META_KEY = "mmcompile"
Place = tuple[str, int]
"""Place of a node in the model: (component name, layer index)."""


class ComponentKind(StrEnum):
    """Role of a component in the model."""

    ENCODER = "encoder"
    PROJECTOR = "projector"
    LANGUAGE_MODEL = "language_model"


class CaptureMode(StrEnum):
    """Mode in which a graph was captured, best first."""

    SYMBOLIC = "symbolic"  # one graph for every size of its dynamic dims
    BUCKET = "bucket"  # one graph per shape and per value read by Python, guarded
    PLAIN = "plain"  # torch.export without known values


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """Annotation of one `call_function` node.

    `shared` nodes depend on integer inputs, sizes, buffers and constants only (masks, positions, rotary tables):
    they belong to no component, and every stage that needs one may compute it again.
    """

    component: str | None
    """Component name, or None for a shared node."""
    layer: int
    """Index of the node's layer in the component's layers; 0 for shared nodes."""
    module_path: str
    """Dotted path of the innermost module that made the node, "" for the model's own forward."""
    carries_gradient: bool = False
    """True if gradient passes through the node.

    An input carries gradient or a parameter read is trainable (thesis, Eq. 3.1-3.3), and the loss depends on the node. Set by the
    gradient-flow pass.
    """
    forward_flops: int = 0
    input_grad_flops: int = 0
    weight_grad_flops: int = 0
    bytes_moved: int = 0
    """Bytes that the node's forward reads and writes."""
    flops_rule: Callable[[fx.Node], Any] | None = field(default=None, repr=False)
    """Rule that counts the node's FLOPs in place of the op's own (`mmcompile.passes.cost.op_flops.FlopsRule`). Set by the
    op-costs pass."""

    @property
    def shared(self) -> bool:
        """True if the node belongs to no component."""
        return self.component is None

    def at_same_place(self, *, carries_gradient: bool = False) -> NodeInfo:
        """Return the annotation of a new node in the same layer and module; its costs are not known."""
        return NodeInfo(
            component=self.component, layer=self.layer, module_path=self.module_path, carries_gradient=carries_gradient
        )


def info(node: fx.Node) -> NodeInfo:
    """Return the annotation of a `call_function` node; KeyError if the node was never annotated."""
    return node.meta[META_KEY]


def results_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes that a graph returns."""
    results: Any = graph.output_node().args[0]
    return tuple(results)


def component_of(node: fx.Node) -> str:
    """Return the component of a node that is not shared."""
    name = info(node).component
    assert name is not None, f"{node.name} is a shared node"
    return name


def annotate(node: fx.Node, **changes: object) -> None:
    """Replace fields of a node's annotation (the only way annotations change)."""
    node.meta[META_KEY] = replace(node.meta[META_KEY], **changes)  # type: ignore[arg-type]


def describe(node: fx.Node, note: NodeInfo, value: Any, symbolic_shape: Iterable[Any] | None = None) -> fx.Node:
    """Annotate a new call node, and return it.

    Args:
        value: recorded result of the node; tensors have no data.
        symbolic_shape: sizes of the result, with symbols where they may vary; None if all are fixed.
    """
    node.meta = {META_KEY: note, "module_path": note.module_path, "val": value}
    if symbolic_shape is not None:
        node.meta["symbolic_shape"] = tuple(symbolic_shape)
    return node


def reached(
    starts: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes
) -> dict[fx.Node, None]:
    """Return the nodes reached from `starts`, themselves included, as an ordered set, depth first.

    Args:
        following: function that returns the nodes one step from a node; the default gives all that `starts` depend on.
    """
    found: dict[fx.Node, None] = {}
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += following(node)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """A parameter under its original name. Tied parameters are one spec with the other names as aliases."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()
    shard: TensorShard | None = None
    """Sharding that this parameter is a part of; None for a whole parameter."""
    index: int = 0
    """Index of this parameter's part in `shard`."""

    @property
    def whole_name(self) -> str:
        """The model's name of the whole parameter."""
        return self.name if self.shard is None else self.name.rpartition("@")[0]

    def part(self, shard: TensorShard, index: int) -> ParameterSpec:
        """Return the part of this parameter that a rank holds, as `<name>@<index>`; its aliases stay those of the whole."""
        return replace(self, name=f"{self.name}@{index}", shape=shard.local_shape(self.shape), shard=shard, index=index)

    def of_replica(self, replica: int) -> ParameterSpec:
        """Return the part that replica `replica` holds, from that of replica 0 (`self`): equal if replicas do not shard it."""
        if self.shard is None or self.shard.replicas == 1:
            return self
        index = self.index + replica
        return replace(self, name=f"{self.whole_name}@{index}", index=index)

    @property
    def num_elements(self) -> int:
        """Number of elements of the parameter; if `shard` is set, of the part of the parameter that this spec describes."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.num_elements * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The smallest unit a plan can move: one block of a component, or the nodes before or after its blocks."""

    index: int
    name: str
    """Module path of the block (`model.language_model.layers.3`), or of the first module in it."""
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A modality module: an encoder, a projector, the language model."""

    name: str
    kind: ComponentKind
    sources: tuple[str, ...]
    """Names of float or token inputs whose values reach the component (`pixel_values`, `input_ids`)."""
    modules: tuple[str, ...]
    """Paths of the modules that belong to the component; () for the component that holds all remaining modules."""
    layers: tuple[Layer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInfo:
    """Form of the loss: our node summing over valid tokens, or the model's own scalar."""

    per_token: bool
    """True: the graph returns (sum of token losses, number of valid tokens); a step's sum is divided once, by all its tokens."""
    reason: str = ""
    """Reason why `per_token` is False (each microbatch then weighs by its number of samples)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGraph:
    """A captured training step of a model: the annotated FX graph, its components, inputs and parameters."""

    name: str
    """Class name of the model."""
    module: fx.GraphModule = field(repr=False, compare=False)
    """FX graph: inputs by name -> (loss,) or (loss sum, valid tokens); parameters have their original names."""
    components: tuple[Component, ...]
    edges: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Edges of the component DAG: (producer, consumer, names of the tensors sent)."""
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[str, ...]
    loss: LossInfo
    mode: CaptureMode
    reasons: tuple[str, ...] = ()
    """Reasons why better capture modes failed, one line for each mode."""
    dynamic: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Input name -> dims that may vary without a new capture."""
    hints: Mapping[str, int] = field(default_factory=dict)
    """Size symbol -> its value in the captured batch."""
    num_samples: int = 1
    """Number of samples in the captured batch."""
    shards: Mapping[str, TensorShard] = field(default_factory=dict)
    """First name of a sharded parameter -> its sharding in a tensor-parallel group; `parameters` keep whole shapes."""
    rewrites: tuple[str, ...] = ()
    """One line for each rewrite that a rewriting pass made or left out."""

    def component(self, name: str) -> Component:
        """Return the component called `name`. Raises KeyError, with the valid names, if there is none."""
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(f"no component {name!r}; components are {', '.join(c.name for c in self.components)}")

    def check_components(self, names: Iterable[str], purpose: str) -> None:
        """Raise ConfigError if the model has no component of one of `names`; `purpose` is the use for it, such as "to shard"."""
        known = [component.name for component in self.components]
        for name in names:
            if name not in known:
                raise ConfigError(f"no component {name!r} {purpose}; components are {', '.join(known)}")

    @property
    def calls(self) -> list[fx.Node]:
        """All `call_function` nodes, in graph order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def layer_nodes(self) -> dict[Place, list[fx.Node]]:
        """Return (component, layer) -> its call nodes in graph order; shared nodes are in no layer."""
        found: dict[Place, list[fx.Node]] = defaultdict(list)
        for node in self.calls:
            if not info(node).shared:
                found[component_of(node), info(node).layer].append(node)
        return dict(found)

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """Every name of a parameter, aliases included -> the parameter."""
        return {name: spec for spec in self.parameters for name in (spec.name, *spec.aliases)}

    def dag(self) -> nx.DiGraph[str]:
        """Return the component DAG; each edge has the attribute `tensors`, the names of the tensors sent."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(component.name for component in self.components)
        for producer, consumer, tensors in self.edges:
            graph.add_edge(producer, consumer, tensors=tensors)
        return graph

    @property
    def main_dtype(self) -> str:
        """Name of the dtype that most parameter elements have."""
        counts: Counter[str] = Counter()
        for spec in self.parameters:
            counts[spec.dtype] += spec.num_elements
        return counts.most_common(1)[0][0] if counts else "float32"

    @property
    def loss_component(self) -> str:
        """Name of the component that computes the loss; no other component reads from it."""
        (sink,) = [name for name, degree in self.dag().out_degree() if degree == 0]
        return sink


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name: `"float32"` -> `torch.float32`."""
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype: `torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")
