"""`BitfieldAttention`: attention under a mask of a known form becomes attention under one word a token.

    mask = (arange <= arange[:, None]) & valid[:, None] ...        [B, 1, T, T]
    out = scaled_dot_product_attention(q, k, v, mask)

becomes

    words = attention_words(valid, None, islands, True, None, B, T)                                [B, T]
    call = mmcompile.bitfield_attention(q, k, v, words, positions, words, positions, scale, window, impl)
    out = call[0]

and the computation of the mask leaves the graph. Attention under a mask that words cannot express is not rewritten;
`ModelGraph.rewrites` has the reason.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar, final, get_args

import torch
from torch import fx

import mmcompile.kernels.bitfield_attention.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers its op)
from mmcompile.errors import ConfigError
from mmcompile.ir.copy import copied, rewritten
from mmcompile.ir.graph import ComponentKind, ModelGraph, component_of, describe, info
from mmcompile.ir.host_shapes import drop_unread
from mmcompile.kernels.bitfield_attention.impl.backends import Impl
from mmcompile.passes.base import Rewrite
from mmcompile.passes.masks.mask_formula import MaskFormula, recognise
from mmcompile.passes.masks.mask_nodes import NodeMaker, extent_of
from mmcompile.passes.masks.mask_reader import MaskReader
from mmcompile.passes.masks.predicates import UnrecognisedMask
from mmcompile.passes.values import aliased, aten_ops, computed, given, op_name, shape
from mmcompile.units import runs

_PROJECTIONS = aten_ops("linear matmul mm bmm addmm baddbmm conv1d")
_VIEWS = aten_ops("view reshape _unsafe_view clone contiguous slice flatten")
_RESHAPES = _VIEWS | aten_ops("transpose permute squeeze unsqueeze")
_LEVELS = 2
"""Maximum number of projections between an attention's input and its queries or keys: two in low-rank attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BitfieldAttention(Rewrite):
    """Pass that rewrites the self-attention of language models whose masks mask words can express.

    Raises (in `run`):
        ConfigError: a component is not there.
    """

    name: ClassVar[str] = "bitfield-attention"

    components: tuple[str, ...] = ()
    """Components to rewrite; () for every language model."""
    impl: str = "auto"
    """Implementation of the op: "auto", "eager" or "triton"."""

    def __post_init__(self) -> None:
        if self.impl not in get_args(Impl):
            raise ConfigError(
                f"impl={self.impl!r} is no implementation of bitfield attention; choose {', '.join(get_args(Impl))}"
            )

    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return a graph in which attention calls are bitfield attention where mask words can express the mask."""
        graph.check_components(self.components, "whose attention could be rewritten")
        models = [component.name for component in graph.components if component.kind is ComponentKind.LANGUAGE_MODEL]
        components = self.components or models
        made = copied(graph)
        work = _AttentionRewriter(impl=self.impl)
        for call in made.calls:
            if op_name(call) == "aten.scaled_dot_product_attention" and info(call).component in components:
                work.rewrite(call)
        drop_unread(made.module.graph, work.replaced)
        present = {str(node.target) for node in made.module.graph.nodes if node.op == "placeholder"}
        lines = [line for line in work.lines() if line not in graph.rewrites]
        return rewritten(made, lines, inputs=tuple(spec for spec in made.inputs if spec.name in present))


def _called(node: fx.Node) -> str | None:
    return op_name(node) if node.op == "call_function" else None


_Words = tuple[fx.Node, fx.Node]
"""The two graph nodes with the mask words and the positions of tokens; attention calls with the same mask share them."""


@final
class _AttentionRewriter:
    """Replaces the attention calls of one graph by bitfield attention; records the reason for each call that stays."""

    def __init__(self, impl: str) -> None:
        self._impl = impl
        self._masks: dict[tuple[fx.Node, bool], tuple[MaskFormula, MaskReader]] = {}
        self._made: dict[tuple[MaskFormula, tuple[str, ...]], _Words] = {}
        self._done: dict[tuple[str, fx.Node, int | None], list[int]] = {}
        """(component, words node, window) -> indices of the layers rewritten."""
        self._left: list[str] = []
        self.replaced: list[fx.Node] = []
        """Attention calls that nothing reads any more."""

    def rewrite(self, call: fx.Node) -> None:
        try:
            _check(call)
            formula, words = self._words(call)
        except UnrecognisedMask as reason:
            self._left.append(f"{info(call).module_path or call.name} left as it is: {reason}")
            return
        _replace(call, words, formula.window, self._impl)
        self.replaced.append(call)
        self._done.setdefault((component_of(call), words[0], formula.window), []).append(info(call).layer)

    def _words(self, call: fx.Node) -> tuple[MaskFormula, _Words]:
        """Return the mask formula of an attention call, and the nodes of its mask words and positions (made at the first use)."""
        mask, causal, extent = given(call)["attn_mask"], given(call)["is_causal"], extent_of(given(call)["query"])
        if (mask, causal) not in self._masks:
            reader = MaskReader()
            self._masks[mask, causal] = recognise(mask, reader, causal=causal), reader
        formula, reader = self._masks[mask, causal]
        key = replace(formula, window=None, window_bounds_islands=False), tuple(map(str, extent.symbolic))
        if key not in self._made:
            before = call if mask is None else mask
            maker = NodeMaker(before, extent, reader, info(before).module_path)
            words = maker.words(formula)
            self._made[key] = words, maker.positions(words)
        words, _ = self._made[key]
        if formula.window_bounds_islands:
            known = words.args[4]
            least = formula.window if known is None else min(known, formula.window)  # type: ignore[type-var]
            words.update_arg(4, least)
        return formula, self._made[key]

    def lines(self) -> list[str]:
        changed = [
            f"bitfield-attention: {component} {_layers(layers)} under {words.name}"
            f"{'' if window is None else f', window {window}'}"
            for (component, words, window), layers in self._done.items()
        ]
        return [*changed, *(f"bitfield-attention: {line}" for line in self._left)]


def _layers(layers: list[int]) -> str:
    # `layers 1-4, 6`
    found = runs(sorted(set(layers)))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
    return f"layer{'s' if len(set(layers)) > 1 else ''} {text}"


def _check(call: fx.Node) -> None:
    """Raise UnrecognisedMask if an attention call has an unsupported option or is not self-attention over one sequence."""
    arguments = given(call)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if any(len(shape(x)) != 4 for x in (query, key, value)):
        raise UnrecognisedMask(f"queries are {list(shape(query))}, not [batch, heads, tokens, dim]")
    if arguments["dropout_p"]:
        raise UnrecognisedMask(f"it drops weights with probability {arguments['dropout_p']}")
    if len({x.meta["val"].dtype for x in (query, key, value)}) > 1:
        raise UnrecognisedMask("queries, keys and values are of different dtypes")
    if shape(value)[-1] != shape(query)[-1]:
        raise UnrecognisedMask(f"head dims are {shape(query)[-1]} of queries and {shape(value)[-1]} of values")
    if extent_of(query) != extent_of(key):
        sides = [" x ".join(map(str, extent_of(x).symbolic)) for x in (query, key)]
        raise UnrecognisedMask(f"{sides[0]} queries see {sides[1]} keys of something else (cross-attention)")
    if not _sources(query, call) & _sources(key, call):
        raise UnrecognisedMask("queries and keys are made of different values (cross-attention)")


def _sources(node: fx.Node, call: fx.Node) -> set[fx.Node]:
    """Return the nodes from which `node`, the queries or keys of an attention call, is computed.

    Nodes of other layers than the call's are left out, and at most `_LEVELS` projections are followed backwards.
    """
    level, found = {node}, set()
    for _ in range(_LEVELS + 1):
        parts = [_until_projections(start, call) for start in level]
        found |= set().union(*(seen for seen, _ in parts))
        level = set().union(*(inputs for _, inputs in parts))
    return found


def _until_projections(start: fx.Node, call: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return (nodes that `start` is made from, back to projections and the layer's inputs; the inputs of these projections)."""
    seen, inputs, waiting = set(), set(), [start]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or info(node).shared:
            continue
        seen.add(node)
        if (info(node).component, info(node).layer) != (info(call).component, info(call).layer):
            continue
        if op_name(node) in _PROJECTIONS:
            inputs.add(node.all_input_nodes[0])
        else:
            waiting += node.all_input_nodes
    return seen, inputs


def _replace(call: fx.Node, words: _Words, window: int | None, impl: str) -> None:
    graph, arguments = call.graph, given(call)
    query, key, value = arguments["query"], *_unexpanded(call, arguments["key"], arguments["value"])
    scale = arguments["scale"]
    options = (shape(query)[-1] ** -0.5 if scale is None else scale, window, impl)
    with graph.inserting_before(call):
        arguments = (query, key, value, *words, *words, *options)
        pair = graph.call_function(torch.ops.mmcompile.bitfield_attention.default, arguments)
        out = graph.call_function(operator.getitem, (pair, 0))
    place = info(call).at_same_place(carries_gradient=info(call).carries_gradient)
    result = torch.empty(call.meta["val"].shape, dtype=call.meta["val"].dtype, device="meta")
    sums = torch.empty(result.shape[:3], dtype=torch.promote_types(result.dtype, torch.float32), device="meta")
    describe(pair, place, (result, sums))
    describe(out, place, result, call.meta.get("symbolic_shape"))
    call.replace_all_uses_with(out)
    _record_views(out)


def _record_views(node: fx.Node) -> None:
    # Bitfield attention may lay out its result in other strides.
    for user in node.users:
        if _called(user) in _RESHAPES and aliased(user) == (node,):
            user.meta["val"] = computed(user)
            _record_views(user)


def _unexpanded(call: fx.Node, key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return a call's keys and values before their heads were repeated; unchanged if other calls read the repeated ones."""
    found = [_before_repeat(x, call) for x in (key, value)]
    if None in found or shape(found[0])[1] != shape(found[1])[1]:  # type: ignore[arg-type]
        return key, value
    return found[0], found[1]  # type: ignore[return-value]


def _before_repeat(node: fx.Node, reader: fx.Node) -> fx.Node | None:
    """Return the node [B, Hkv, T, D] whose heads were repeated H / Hkv times to make [B, H, T, D]; None if there is none."""
    chain = [node]
    while _called(chain[-1]) in _VIEWS:
        chain.append(chain[-1].all_input_nodes[0])
    if any(set(part.users) != {user} for part, user in zip(chain, [reader, *chain], strict=False)):
        return None
    last = chain[-1]
    if _called(last) == "aten.repeat_interleave":
        repeated = len(chain) == 1 and isinstance(given(last)["repeats"], int) and given(last)["dim"] in (1, -3)
        return _own(last.all_input_nodes[0], reader) if repeated else None
    source = last.all_input_nodes[0] if _called(last) == "aten.expand" else node
    while _called(source) == "aten.slice" and shape(source) == shape(source.all_input_nodes[0]):
        source = source.all_input_nodes[0]
    if _called(source) != "aten.unsqueeze" or given(source)["dim"] not in (2, -3):
        return None
    found = source.all_input_nodes[0]
    batch, heads, tokens, dim = shape(node)
    expanded = (batch, shape(found)[1], heads // shape(found)[1], tokens, dim)
    alike = shape(last) == expanded and all(shape(view) in (expanded, shape(node)) for view in chain[:-1])
    return _own(found, reader) if alike else None


def _own(node: fx.Node, reader: fx.Node) -> fx.Node | None:
    return node if node.op == "call_function" and info(node).component == info(reader).component else None
