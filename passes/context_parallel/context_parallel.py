"""`ContextParallel`: lets several ranks run a language model together, each on its own tokens of every sequence.

All ranks run the same nodes. Layer 0 of the component (embedding and merge of features) and shared values (rotary
tables, shifted labels) stay whole; where they enter the *region*, the component's layers from 1 on, `shard_tokens`
takes the rank's rows of them. In the region every op must treat tokens alike, attention excepted: it gathers keys and
values from all ranks. The loss node returns the sum over the rank's own tokens and their number. A gradient of a
parameter, or one that leaves the region for layer 0 or another component, is therefore a rank's share: the sum over
ranks is the whole gradient.

New inputs of the graph, for P ranks of L rows each (`mmcompile.codegen.token_shards.shard_values` computes them):

    cp_index         [L] int64: the rank's tokens in order, -1 for free rows
    cp_positions     [B, L] int32: positions of the rank's tokens in the whole sequence
    cp_kv_positions  [B, P*L] int32: positions of the gathered rows
    cp_words         [B, L] int64: mask words of the rank's tokens, 0 for free rows
    cp_kv_words      [B, P*L] int64: mask words of the gathered rows

A graph whose layers use several kinds of words has `cp_words_1`, `cp_kv_words_1`, and so on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.copy import copied, rewritten
from mmcompile.ir.graph import ModelGraph, info, results_of
from mmcompile.ir.nodes import token_loss
from mmcompile.ir.sizes import spec_of
from mmcompile.kernels.bitfield_attention.parallel.attention import (
    context_parallel_attention as context_parallel_attention,
)
from mmcompile.kernels.bitfield_attention.parallel.token_blocks import padded_length
from mmcompile.passes.base import Rewrite
from mmcompile.passes.context_parallel.sequence_sharding import SequenceSharder
from mmcompile.passes.context_parallel.token_axis import (
    LOCAL_TOKENS,
    Size,
    TokenAxis,
    TokenFlow,
    follow,
    localize,
    number,
)
from mmcompile.passes.context_parallel.token_rules import rule_of
from mmcompile.passes.values import draws_random, op_name, shape, sizes

_ATTENTION = "mmcompile.bitfield_attention"
INDEX, POSITIONS, KV_POSITIONS = "cp_index", "cp_positions", "cp_kv_positions"
WORDS, KV_WORDS = "cp_words", "cp_kv_words"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel(Rewrite):
    """Pass that shards the tokens of a component's layers from 1 on over ranks.

    Raises (in `run`):
        ConfigError: the component does not exist or is not the one that ends in the loss.
        PlanError: the loss is not per token, attention is not bitfield attention, or an op mixes tokens.
    """

    name: ClassVar[str] = "context-parallel"

    component: str
    num_ranks: int
    local_tokens: int | None = None
    """Number of token rows on one rank in the captured batch; only recorded shapes depend on it.

    None: equal parts of the sequence, padded with rows without a token.
    """
    head_stride: int = 0
    """Number of key/value heads gathered at a time, so that gathering overlaps with computation; 0 gathers all at once."""
    group: str = "cp"
    """Name of the process group whose ranks share a sequence."""

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ConfigError(
                f"context parallelism over {self.num_ranks} ranks has no effect; give 2 or more, or leave it out"
            )
        if self.local_tokens is not None and self.local_tokens < 1:
            raise ConfigError(f"local_tokens must be at least 1, got {self.local_tokens}")

    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return the graph that one rank runs on its own tokens."""
        self._check(graph)
        made = copied(graph)
        nodes = [node for node in made.calls if info(node).component == self.component and info(node).layer >= 1]
        words = _words(made, self.component, nodes)
        batch, tokens = shape(words[0])
        local_tokens = self.local_tokens or padded_length(tokens, self.num_ranks) // self.num_ranks
        inputs = _Inputs.added(made, words, self.num_ranks, local_tokens, batch=sizes(words[0])[0])
        spreader = SequenceSharder(graph=made, component=self.component, index=inputs.index, tokens=sizes(words[0])[1])
        flow = TokenFlow(graph=made, tokens=tokens, spread=spreader.spread)
        spreader.flow = flow
        _spread_entries(flow, nodes, self.component, batch)
        follow(flow, nodes, rule_of)
        _check_whole(flow, nodes)
        _gather_keys(made, nodes, inputs, self)
        localize(flow, local_tokens)
        _drop_unread(made.module.graph)
        line = f"{self.name}: tokens of {self.component} on {self.num_ranks} ranks"
        return rewritten(made, (line,), inputs=(*made.inputs, *map(spec_of, inputs.nodes)))

    def _check(self, graph: ModelGraph) -> None:
        graph.check_components((self.component,), "to spread over ranks")
        if self.component != graph.loss_component:
            raise ConfigError(
                f"only the component that ends in the loss, {graph.loss_component!r}, can be spread over ranks, "
                f"got {self.component!r}"
            )
        results = results_of(graph.module.graph)
        if not graph.loss.per_token or any(_call(node) is not token_loss for node in results):
            raise PlanError(
                "context parallelism needs a loss that is a sum over tokens, so that each rank can add its own: "
                f"{graph.loss.reason or 'the graph returns something else'}; plan this model without context parallelism"
            )


def _call(node: fx.Node) -> Any:
    source = node.args[0] if node.target is operator.getitem else node
    return source.target if isinstance(source, fx.Node) else None


def _words(graph: ModelGraph, component: str, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the graph inputs with masks (one int64 word a token) that attention calls in `nodes` read, in order of first use."""
    words = []
    for node in nodes:
        if op_name(node) != _ATTENTION:
            continue
        given, positions, kv_words, kv_positions = node.args[3:7]
        own = kv_words in (None, given) and kv_positions in (None, positions)
        if not isinstance(given, fx.Node) or given.op != "placeholder" or not own:
            raise PlanError(
                f"context parallelism needs attention to the queries' own tokens, with words that are an input of the graph; "
                f"{node.name} in {info(node).module_path} has words {given} and keys' words {kv_words}"
            )
        words.append(given)
    if not words:
        raise PlanError(
            f"context parallelism finds no bitfield attention in the layers of {component}: each rank would see its own "
            f"tokens only ({'; '.join(graph.rewrites) or 'no attention was rewritten'}); run the pass bitfield-attention "
            "first, or plan without context_parallel"
        )
    return list(dict.fromkeys(words))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """Graph inputs `cp_*` that the pass adds: a rank's token indices, and positions and mask words of its and of all tokens."""

    index: fx.Node
    positions: fx.Node
    kv_positions: fx.Node
    words: Mapping[fx.Node, fx.Node]
    """Graph input with the mask words (int64, one a token) of all tokens -> input with those of the rank's tokens."""
    kv_words: Mapping[fx.Node, fx.Node]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        pairs = [node for whole in self.words for node in (self.words[whole], self.kv_words[whole])]
        return (self.index, self.positions, self.kv_positions, *pairs)

    @classmethod
    def added(
        cls, graph: ModelGraph, words: list[fx.Node], num_ranks: int, local_tokens: int, *, batch: Size
    ) -> _Inputs:
        roots: frozenset[str] = frozenset().union(*(node.meta.get("roots", {str(node.target)}) for node in words))
        gathered = num_ranks * LOCAL_TOKENS

        def add(name: str, *full: Size, dtype: torch.dtype, shard: bool, source: str = "") -> fx.Node:
            local = [number(size, {**graph.hints, str(LOCAL_TOKENS): local_tokens}) for size in full]
            last = [node for node in graph.module.graph.nodes if node.op == "placeholder"][-1]
            with graph.module.graph.inserting_after(last):
                node = graph.module.graph.placeholder(name)
            node.meta = {"val": torch.empty(local, dtype=dtype, device="meta"), "symbolic_shape": tuple(full)}
            node.meta |= {"roots": roots, "from_integers": True}
            if shard:
                node.meta["shard"] = True
            if source:
                node.meta["words"] = source
            return node

        index = add(INDEX, LOCAL_TOKENS, dtype=torch.int64, shard=True)
        positions = add(POSITIONS, batch, LOCAL_TOKENS, dtype=torch.int32, shard=True)
        kv_positions = add(KV_POSITIONS, batch, gathered, dtype=torch.int32, shard=False)
        local_words, kv_words = {}, {}
        for count, node in enumerate(words):
            ending, source = (f"_{count}" if count else ""), str(node.target)
            local_words[node] = add(WORDS + ending, batch, LOCAL_TOKENS, dtype=torch.int64, shard=True, source=source)
            kv_words[node] = add(KV_WORDS + ending, batch, gathered, dtype=torch.int64, shard=False, source=source)
        return cls(index=index, positions=positions, kv_positions=kv_positions, words=local_words, kv_words=kv_words)


def _spread_entries(flow: TokenFlow, nodes: Iterable[fx.Node], component: str, batch: int) -> None:
    """Shard the values [batch, tokens, ...] that layer 0 of a component makes and `nodes`, of later layers, read.

    Each read goes through a new node that selects the rank's tokens.
    """
    for node in nodes:
        for value in node.all_input_nodes:
            if value.op != "call_function" or info(value).component != component or info(value).layer:
                continue
            if isinstance(value.meta["val"], torch.Tensor) and shape(value)[:2] == (batch, flow.tokens):
                node.replace_input_with(value, flow.to_spread(node, value, TokenAxis(dim=1)))


def _check_whole(flow: TokenFlow, nodes: Iterable[fx.Node]) -> None:
    """Raise PlanError for each attention, loss or random op in `nodes` that gets no input split by tokens.

    Every rank would compute it for all tokens, and count the loss several times or draw different numbers.
    """
    for node in nodes:
        if node in flow.axes or flow.spread_inputs(node):
            continue
        if op_name(node) == _ATTENTION:
            flow.refuse(node, "its queries, keys and values are whole; no value of layer 0 with a token dim reaches it")
        if node.target is token_loss:
            flow.refuse(node, "its logits are whole: every rank would count all tokens")
        if draws_random(node):
            flow.refuse(node, "it draws random numbers for a value that all ranks must agree on")


def _gather_keys(graph: ModelGraph, nodes: Iterable[fx.Node], inputs: _Inputs, options: ContextParallel) -> None:
    """Replace each attention op over a rank's tokens by one that gathers the keys and values of all ranks first."""
    for node in nodes:
        if op_name(node) != _ATTENTION:
            continue
        query, key, value, words, _, _, _, scale, window, *_ = node.args
        assert isinstance(words, fx.Node)
        node.target = torch.ops.mmcompile.context_parallel_attention.default
        node.args = (
            *(query, key, value),
            *(inputs.words[words], inputs.positions, inputs.kv_words[words], inputs.kv_positions),
            *(scale, window, options.head_stride, options.group, options.num_ranks),
        )
        node.kwargs = {}


def _drop_unread(graph: fx.Graph) -> None:
    # A shared value may have duplicates, of which only one was sharded.
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and info(node).shared and not node.users:
            graph.erase_node(node)
