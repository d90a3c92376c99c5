"""`ShardKinds`: kinds of sharded layers, so that one layer of each kind is checked. A layer has the same kind for every batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.ir.graph import ModelGraph, ParameterSpec, info
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.passes.tensor_parallel.validation.lockstep_ranks import ACROSS
from mmcompile.passes.values import op_name


@dataclass(kw_only=True, slots=True)
class ShardKinds:
    """Kinds of layers, from a graph and its sharded form.

    Two layers are of one kind if the whole graph's `layer_kinds` are equal and sharding changed them alike: the same
    ops read the same parts of the same values. Integer arguments may be sizes of a batch, so the ratio of each to that of the
    whole graph is compared (such as 1/4). Those of nodes `tp_*` are blocks and heads of the model, and are compared as they are.
    """

    whole: ModelGraph
    sharded: ModelGraph
    _kinds: Mapping[str, Sequence[str]] = field(init=False)
    _before: Mapping[str, fx.Node] = field(init=False)
    _specs: Mapping[str, ParameterSpec] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = layer_kinds(self.whole)
        self._before = {node.name: node for node in self.whole.module.graph.nodes}
        self._specs = self.whole.specs

    def of(self, place: tuple[str, int], nodes: Sequence[fx.Node]) -> str:
        """Return the kind of a layer of the sharded graph, as text that is equal for equal kinds in any process."""
        component, layer = place
        numbers: dict[fx.Node, str] = {node: str(number) for number, node in enumerate(nodes)}
        lines = [self._line(node, numbers) for node in nodes]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        return f"{self._kinds[component][layer]}-{digest}"

    def _line(self, node: fx.Node, numbers: dict[fx.Node, str]) -> str:
        readers = sorted({self._reader(user, node, numbers) for user in node.users})
        sources = [self._source(source, node, numbers) for source in node.all_input_nodes]
        return f"{op_name(node)} {' '.join(sources)} {' '.join(self._literals(node))} -> {' '.join(readers)}"

    def _source(self, source: fx.Node, node: fx.Node, numbers: dict[fx.Node, str]) -> str:
        if source in numbers:
            return numbers[source]
        if source.op == "call_function":
            maker = info(source).component
            # The same value wherever it is read: numbered, too.
            numbers[source] = f"{'own' if maker == info(node).component else maker}{len(numbers)}"
            return numbers[source]
        spec = self._specs.get(str(source.target))
        if spec is None:
            return source.op if source.op == "get_attr" else str(source.target)
        return f"{list(spec.shape)}{'*' if spec.trainable else ''}{self.sharded.shards.get(spec.name)}"

    def _reader(self, user: fx.Node, node: fx.Node, numbers: Mapping[fx.Node, str]) -> str:
        if user in numbers:
            return ""
        return "own" if user.op != "call_function" or info(user).component == info(node).component else "foreign"

    def _literals(self, node: fx.Node) -> Iterator[str]:
        own = list(_plain((node.args, node.kwargs)))
        before = self._before.get(node.name)
        if before is None or op_name(node) in ACROSS:
            yield from map(str, own)
            return
        for now, was in zip_longest(own, _plain((before.args, before.kwargs))):
            if type(now) is not int or type(was) is not int:
                yield str(now)
            elif now != was:
                yield f"{was / now:g}" if now else f"{was}>{now}"


def _plain(value: Any) -> Iterable[Any]:
    return (leaf for leaf in pytree.tree_leaves(value) if not isinstance(leaf, (fx.Node, torch.device)))
