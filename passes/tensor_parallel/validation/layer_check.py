"""`check_shards`: check before training that tensor-parallel ranks compute the same as the whole layer.

One layer of every kind is cut out of the whole and of the sharded graph. Both are run forward and backward, with all ranks in
this process. Weights, float inputs from other layers and gradients of the outputs are random. Masks, positions and rotary tables
depend on integers alone. They must be valid, so they are computed from the batch. Integers that other layers make from floats (a
router's choice) are computed from random values of these floats.

Layers run in float32. If results differ, they run again in float64: rounding alone, after which a router may pick another expert,
must not fail the check. Dropout is off. torch's global random generators are not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import ModelGraph, ParameterSpec, Place, info, reached
from mmcompile.passes.cost.op_flops import op_flops
from mmcompile.passes.tensor_parallel.validation.layer_kinds_sharded import ShardKinds
from mmcompile.passes.tensor_parallel.validation.layer_matches import LayerMatches
from mmcompile.passes.tensor_parallel.validation.layer_outcome import LayerOutcome, difference
from mmcompile.passes.tensor_parallel.validation.lockstep_ranks import ACROSS, Lockstep, World, is_random
from mmcompile.passes.tensor_parallel.validation.random_values import RandomValues
from mmcompile.passes.text import origin
from mmcompile.passes.values import op_name, tensors

_MOST_ELEMENTS = 1_000_000_000
"""Maximum number of elements in a checked layer's parameters: a check holds about four times their float32 bytes."""
_MOST_FLOPS = 2e12
"""Maximum FLOPs of a checked layer's forward in the captured batch; a check computes about six times as many."""
_DTYPES = {torch.float32: 1e-2, torch.float64: 1e-6}
"""Dtype of the computation -> smallest scale for comparing a gradient, as a fraction of the layer's largest gradient.

Without this scale, gradients that are 0 but for rounding, such as that of a bias of keys, would be compared by rounding errors.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCheck:
    """Result of `check_shards`: the kinds of layers that were checked, and those that were not."""

    validated: Set[str]
    """Kinds of layers whose ranks compute what the whole layer computes."""
    unchecked: tuple[str, ...]
    """One line with the reason for each kind of layers that was not checked."""


def check_shards(
    whole: ModelGraph, sharded: ModelGraph, inputs: Mapping[str, Any], known: Set[str] = frozenset()
) -> ShardCheck:
    """Run one sharded layer of every kind, whole and on ranks, and compare the results.

    Args:
        whole: before the pass tensor-parallel, with `carries_gradient` set. Parameters' values are not read; buffers'
            are.
        sharded: the graph that the pass made of `whole`.
        inputs: values of the graph's inputs in the captured batch, sizes and host values included.
        known: kinds that need no check, `ShardCheck.validated` of an earlier graph of the same model.

    Raises:
        VerifyError: a layer's ranks compute something else, or fail.
    """
    matches = LayerMatches.of(whole, sharded)
    kinds = ShardKinds(whole=whole, sharded=sharded)
    validated: set[str] = set()
    unchecked: dict[str, list[str]] = {}
    for place, nodes in matches.sharded.items():
        if not _is_sharded(sharded, nodes):
            continue
        kind = kinds.of(place, nodes)
        layer = _Layer(whole=whole, sharded=sharded, place=place, matches=matches, inputs=inputs)
        if kind in unchecked:
            unchecked[kind].append(layer.name)
        elif kind not in validated | known:
            reason = layer.why_not() or layer.compare()
            if reason is None:
                validated.add(kind)
            else:
                unchecked[kind] = [layer.name, reason]
    return ShardCheck(validated=validated, unchecked=tuple(_unchecked(*lines) for lines in unchecked.values()))


def _unchecked(name: str, reason: str, *others: str) -> str:
    more = f" and {len(others)} like it" if others else ""
    return f"{name}{more} not checked: {reason}"


def _is_sharded(graph: ModelGraph, nodes: Sequence[fx.Node]) -> bool:
    read = {spec.name for spec in _parameters(graph, nodes)}
    return not read.isdisjoint(graph.shards) or any(op_name(node) in ACROSS for node in nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """Weights, inputs and gradients with which a layer runs, whole and sharded alike; keys are nodes of the whole graph."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[fx.Node, Any]
    """Node of a value that the layer reads from outside -> its tensor or number, equal in the whole and the sharded run."""
    gradients: Mapping[tuple[fx.Node, bool], list[torch.Tensor]]
    """(Value that other layers read, True if another component reads it) -> random gradients that return to the layer for it."""


@dataclass(kw_only=True, slots=True)
class _Layer:
    whole: ModelGraph
    sharded: ModelGraph
    place: Place
    matches: LayerMatches
    inputs: Mapping[str, Any]
    nodes: Sequence[fx.Node] = field(init=False)
    """Nodes of the layer in the whole graph, in graph order."""

    def __post_init__(self) -> None:
        self.nodes = self.matches.whole.get(self.place, ())

    @property
    def name(self) -> str:
        component, layer = self.place
        return f"layer {layer} of {component} ({self.whole.component(component).layers[layer].name})"

    def why_not(self) -> str | None:
        """Return the reason why the layer is not checked: it is too large, or draws random numbers; None if it is checked."""
        count = sum(spec.num_elements for spec in _parameters(self.whole, self.nodes))
        if count > _MOST_ELEMENTS:
            return f"{count / 1e9:.1f} G elements, at most {_MOST_ELEMENTS / 1e9:.1f} G"
        flops = sum(op_flops(node).forward for node in self.nodes)
        if flops > _MOST_FLOPS:
            return f"{flops / 1e12:.1f} TFLOP in its forward, at most {_MOST_FLOPS / 1e12:.1f}"
        drawing = next((node for node in self.nodes if is_random(node)), None)
        return None if drawing is None else f"{drawing.name} = {op_name(drawing)} draws random numbers"

    def compare(self) -> str | None:
        """Compare the ranks with the whole layer. Return None if they are equal, or the reason if the layer could not be run.

        Raises:
            VerifyError: the layer ran, and the ranks computed something else.
        """
        told = ""
        for dtype, least in _DTYPES.items():
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                given = self._given(dtype)
                wanted = self._ran(self.whole, self.nodes, given, dtype)
                found = self._found(given, dtype)
            except _NotRun as error:
                return str(error)
            finally:
                torch.set_default_dtype(before)
            if wanted.has_nan():
                return "random values made it compute NaN"
            told = difference(found, wanted, least)
            if not told:
                return None
        raise self._error(told)

    def _found(self, given: _Given, dtype: torch.dtype) -> LayerOutcome:
        try:
            return self._ran(self.sharded, self.matches.sharded[self.place], given, dtype)
        except (_NotRun, VerifyError) as error:
            raise self._error(str(error)) from error

    def _error(self, told: str) -> VerifyError:
        component = self.place[0]
        return VerifyError(
            f"{self.name} is sharded wrongly: {told}. This is a bug in mmcompile: run {component} with another degree of tensor "
            "parallelism, or 1, and please report the model"
        )

    def _given(self, dtype: torch.dtype) -> _Given:
        source = RandomValues(dtype)
        outside = list(self.matches.sources(self.nodes))
        needed = self._elsewhere(outside)
        computed = [node for node in needed if not _is_float(node)]
        weights = {spec.name: source.weight(spec) for spec in _parameters(self.whole, [*self.nodes, *computed])}
        elsewhere = Lockstep(self.whole, weights, self.inputs, dtype)
        for node in needed:
            if _is_float(node):
                elsewhere.values[node] = [source.like(tensors(node)[0])]
        with torch.no_grad():
            _run(elsewhere, computed)
        gradients = {
            (value, foreign): [source.like(tensor) for tensor in tensors(value) if tensor.is_floating_point()]
            for value, _, foreign in self.matches.ends(self.nodes)
            if info(value).carries_gradient
        }
        values = {node: elsewhere.values[node][0] for node in outside}
        return _Given(tensors=weights, values=values, gradients=gradients)

    def _elsewhere(self, outside: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the calls, in graph order, that compute the layer's inputs `outside`, back to the first with a float result."""
        needed = reached(outside, lambda node: () if _is_float(node) else node.all_input_nodes)
        return [node for node in self.whole.calls if node in needed]

    def _ran(self, graph: ModelGraph, nodes: Sequence[fx.Node], given: _Given, dtype: torch.dtype) -> LayerOutcome:
        """Run the layer once, forward and backward, with its nodes in `graph`: the whole graph or the sharded one."""
        lockstep = Lockstep(graph, given.tensors, self.inputs, dtype)
        leaves = self._enter(lockstep, nodes, given)
        _run(lockstep, nodes)
        roots, seeds = [], []
        for value, node, foreign in self.matches.ends(nodes):
            for tensor, gradient in _flowing(lockstep.values[node], given.gradients.get((value, foreign), ()), foreign):
                roots.append(tensor)
                seeds.append(gradient)
        if roots:
            with _explaining("the backward"):
                torch.autograd.backward(roots, seeds)
        return LayerOutcome(
            values={
                name: each
                for value, node in self.matches.outputs(nodes)
                for name, each in _named(value, lockstep.values[node])
            },
            input_gradients={
                node.name: [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in each]
                for node, each in leaves.items()
                if each[0].requires_grad
            },
            weight_gradients=lockstep.gradients(),
        )

    def _enter(self, lockstep: Lockstep, nodes: Sequence[fx.Node], given: _Given) -> dict[fx.Node, World]:
        """Set the inputs of a run. Return those that are floats: node of the input -> its leaf tensor on each rank.

        The list has one tensor if another component made the value, since all ranks read the same one then.
        """
        leaves: dict[fx.Node, World] = {}
        for value, sources in self.matches.sources(nodes).items():
            if value not in given.values:
                raise _NotRun(f"it reads {value.name}, which the whole layer does not")
            world = [given.values[value]]
            if _is_float(value):
                count = lockstep.degrees[self.place[0]] if info(value).component == self.place[0] else 1
                world = [world[0].clone().requires_grad_(info(value).carries_gradient) for _ in range(count)]
                leaves[value] = world
            for node in sources:
                lockstep.values[node] = world
        return leaves


class _NotRun(Exception):
    """Exception for a layer that could not be run; the message has the part that failed and torch's error."""


@contextlib.contextmanager
def _explaining(what: str) -> Generator[None]:
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        said = str(error).strip().split("\n")[0][:200]
        raise _NotRun(f"{what} fails: {said}") from error


def _run(lockstep: Lockstep, nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        with _explaining(f"{node.name} = {op_name(node)} in {origin(node)}"):
            lockstep.run([node])


def _flowing(
    world: World, gradients: Sequence[torch.Tensor], foreign: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (float tensor, gradient to start its backward with), for each rank and each float tensor of one node's result.

    Args:
        world: the node's result on each rank.
        gradients: one gradient per float tensor, for all ranks.
        foreign: True for a gradient from another component, which only rank 0 gets; other ranks get zeros.
    """
    for rank, made in enumerate(world):
        floats = filter(_is_float_tensor, pytree.tree_leaves(made))
        for tensor, gradient in zip(floats, gradients, strict=False):
            if tensor.requires_grad and tensor.shape == gradient.shape:
                yield tensor, gradient.to(tensor.dtype) if rank == 0 or not foreign else torch.zeros_like(tensor)


def _named(value: fx.Node, world: World) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield (name, tensor on each rank) for each tensor of a node's result: the node's name; `name[0]`, `name[1]` for a tuple."""
    each = [[leaf.detach() for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)] for made in world]
    for index in range(min(map(len, each))):
        yield value.name if len(each[0]) == 1 else f"{value.name}[{index}]", [leaves[index] for leaves in each]


def _is_float(node: fx.Node) -> bool:
    return node.op == "call_function" and not info(node).shared and _is_float_tensor(node.meta["val"])


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _parameters(graph: ModelGraph, nodes: Iterable[fx.Node]) -> list[ParameterSpec]:
    specs = graph.specs
    names = (str(source.target) for node in nodes for source in node.all_input_nodes)
    return list(dict.fromkeys(specs[name] for name in names if name in specs))
