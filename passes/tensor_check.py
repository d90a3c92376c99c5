"""`tensor_parity`: whether the ranks of a sharded graph together compute what the whole graph computes, gradients included.

All ranks run in one process, in lockstep: a value is a list with one tensor for each rank of its component, and nodes `tp_*` act
across the list, as written here from their definition. What a rank of one component reads from another is what its first rank
made; so, as over real links, gradients of all readers are added up there, and other ranks get none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd import Function

from mmcompile.ir.graph import ModelGraph, info, results_of
from mmcompile.ir.host import attribute
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.values import op_name

NOISE = 1e-6
World = list[Any]
"""A value on every rank of its component; one item where all ranks of all components have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParity:
    """Largest differences, each relative to the largest element of what is compared.

    Gradients below `NOISE` of the largest one are compared on its scale: that of a bias of keys is 0 but for rounding.
    """

    loss: float
    gradients: Mapping[str, float]
    """Parameter -> difference of its gradient, over all ranks."""

    @property
    def worst(self) -> tuple[str, float]:
        """What differs most, and by how much."""
        return max({"loss": self.loss, **self.gradients}.items(), key=lambda pair: pair[1])


def tensor_parity(
    whole: ModelGraph, sharded: ModelGraph, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]
) -> TensorParity:
    """Run forward and backward of both graphs and compare.

    Args:
        whole: before the pass tensor-parallel.
        sharded: after it.
        tensors: parameters and buffers by name, on CPU.
        inputs: values of the graph's inputs, sizes and host values included.

    Raises:
        AssertionError: a parameter has a gradient in one graph and not in the other.
    """
    ours, theirs = _Lockstep(sharded, tensors, inputs), _Lockstep(whole, tensors, inputs)
    losses, (wanted, *_) = ours.run(), theirs.run()
    found, gradients = ours.gradients(), theirs.gradients()
    assert found.keys() == gradients.keys(), (
        f"only one of the graphs makes a gradient of {sorted(found.keys() ^ gradients.keys())}"
    )
    least = NOISE * max((float(grads[0].abs().max()) for grads in gradients.values()), default=0.0)
    return TensorParity(
        loss=max(_difference(loss, wanted, 0.0) for loss in losses),
        gradients={
            name: max(_difference(each, gradients[name][0], least) for each in found[name])
            for name in sorted(gradients)
        },
    )


def _difference(found: torch.Tensor, wanted: torch.Tensor, least: float) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    scale = max(float(wanted.abs().max()), least, torch.finfo(wanted.dtype).tiny)
    return float((found - wanted).abs().max()) / scale


@dataclass(kw_only=True, slots=True)
class _Leaf:
    """A parameter as one component reads it, on each of its ranks."""

    shard: TensorShard | None
    parts: list[torch.Tensor]


class _Lockstep:
    def __init__(self, graph: ModelGraph, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> None:
        self._graph = graph
        self._tensors = tensors
        self._inputs = inputs
        self._specs = {name: spec for spec in graph.parameters for name in (spec.name, *spec.aliases)}
        self._degrees = _degrees(graph)
        self._leaves: dict[tuple[str, str | None], _Leaf] = {}
        self._values: dict[fx.Node, World] = {}

    def run(self) -> list[torch.Tensor]:
        """The loss on every rank; backward is done."""
        for node in self._graph.module.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = [self._inputs[str(node.target)]]
            elif node.op == "call_function":
                self._values[node] = self._call(node)
        losses = self._values[results_of(self._graph.module.graph)[0]]
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        return [loss.detach() for loss in losses]

    def gradients(self) -> dict[str, list[torch.Tensor]]:
        """Parameter -> its whole gradient as each rank has it; parts of a sharded one are joined."""
        found: dict[str, list[torch.Tensor]] = {}
        for (name, _), leaf in self._leaves.items():
            made = [part.grad for part in leaf.parts]
            grads = [grad for grad in made if grad is not None]
            if not grads:
                continue
            assert len(grads) == len(made), f"some ranks have no gradient of {name}"
            each = grads if leaf.shard is None else [leaf.shard.joined(grads)]
            before = found.get(name)
            # Components that share a parameter each add a gradient, of which every rank has the whole.
            found[name] = each if before is None else [one + other for one in before for other in each]
        return found

    def _call(self, node: fx.Node) -> World:
        component = None if info(node).shared else info(node).component
        count = 1 if component is None else self._degrees[component]
        worlds = {source: self._world(source, component, count) for source in node.all_input_nodes}

        def rank(index: int) -> tuple[tuple, dict]:
            return fx.map_arg((node.args, dict(node.kwargs)), lambda source: worlds[source][index])

        across = _ACROSS.get(op_name(node))
        if across is not None:
            each = [rank(index)[0] for index in range(count)]
            return across(*([arguments[i] for arguments in each] for i in range(len(each[0]) - 2)))
        assert callable(node.target)
        made = []
        for args, kwargs in map(rank, range(count)):
            made.append(node.target(*args, **kwargs))
        return made

    def _world(self, source: fx.Node, component: str | None, count: int) -> World:
        """A value as the ranks of a component see it."""
        if source.op == "get_attr":
            return self._parameter(source, component, count)
        values = self._values[source]
        own = source.op == "call_function" and info(source).component == component
        return values if own else [values[0]] * count

    def _parameter(self, source: fx.Node, component: str | None, count: int) -> World:
        name = str(source.target)
        spec = self._specs.get(name)
        if spec is None:
            value = self._tensors[name] if name in self._tensors else attribute(self._graph.module, name)
            return [value] * count
        key = (spec.name, component)
        if key not in self._leaves:
            whole = next(self._tensors[n] for n in (spec.name, *spec.aliases) if n in self._tensors).detach()
            shard = self._graph.shards.get(spec.name)
            parts = [(whole if shard is None else shard.part(whole, index)).clone() for index in range(count)]
            for part in parts:
                part.requires_grad_(spec.trainable)
            self._leaves[key] = _Leaf(shard=shard, parts=parts)
        return self._leaves[key].parts


def _degrees(graph: ModelGraph) -> dict[str, int]:
    """Component -> ranks, from the nodes that act across them."""
    found = {component.name: 1 for component in graph.components}
    for node in graph.module.graph.nodes:
        if op_name(node) in _ACROSS if node.op == "call_function" else False:
            found[str(info(node).component)] = int(node.args[-1])  # type: ignore[arg-type]
    return found


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return (sum(grads[1:], start=grads[0]),) * len(grads)


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        total = sum(values[1:], start=values[0])
        return tuple(total.clone() for _ in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return grads


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return grads[0], *(torch.zeros_like(grad) for grad in grads[1:])


def _apply(function: type[Function]) -> Callable[[World], World]:
    return lambda values: list(function.apply(*values))  # type: ignore[arg-type]


def _slice(values: World, dims: Sequence[int], blocks: Sequence[Sequence[int]]) -> World:
    shard = TensorShard(dim=dims[0], blocks=tuple(blocks[0]), count=len(values))
    return [shard.part(value, index) for index, value in enumerate(values)]


def _heads(values: World, dims: Sequence[int], heads: Sequence[Sequence[int]]) -> World:
    each = len(heads[0]) // len(values)
    return [
        torch.stack([value.select(dims[0], head) for head in heads[0][index * each : (index + 1) * each]], dims[0])
        for index, value in enumerate(values)
    ]


def _embedding(tables: World, ids: World, paddings: Sequence[int]) -> World:
    """A rank's rows, with zeros where the rows of other ranks would be."""
    made = []
    for index, table in enumerate(tables):
        rows = [table if rank == index else torch.zeros_like(table) for rank in range(len(tables))]
        padding = None if paddings[index] < 0 else paddings[index]
        made.append(F.embedding(ids[index], torch.cat(rows), padding_idx=padding))
    return made


def _loss(logits: World, labels: World, ignored: Sequence[int]) -> World:
    """Each rank's loss over all classes, of which only its own are differentiated."""
    made = []
    for index, label in enumerate(labels):
        all_classes = [part if rank == index else part.detach() for rank, part in enumerate(logits)]
        whole = torch.cat(all_classes, 1)
        wide = whole if whole.dtype == torch.float64 else whole.float()
        loss = F.cross_entropy(wide, label, ignore_index=ignored[index], reduction="sum")
        made.append((loss, (label != ignored[index]).sum(), wide.logsumexp(1)))
    return made


_ACROSS: Mapping[str, Callable[..., World]] = {
    "mmcompile.tp_copy": _apply(_Copy),
    "mmcompile.tp_exit": _apply(_Copy),
    "mmcompile.tp_sum": _apply(_Sum),
    "mmcompile.tp_enter": _apply(_Enter),
    "mmcompile.tp_slice": _slice,
    "mmcompile.tp_heads": _heads,
    "mmcompile.tp_embedding": _embedding,
    "mmcompile.tp_token_loss": _loss,
}
"""By op: from its arguments on every rank, without group and count, what it makes on every rank."""
