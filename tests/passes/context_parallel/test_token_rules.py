"""Every rule about tokens: ops that treat tokens alike are followed, exactly; ops that mix them are refused by name."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.graphs.bitfield_graph import WORDS, causal_words, with_words
from support.graphs.shard_jobs import job_of
from support.models.tiny_language import WIDTH, Block, Mix, TinyLanguage, tiny_batch
from support.oracles.token_policies import BlockPolicy, token_blocks
from support.processes.shard_ranks import Job, Ran, ran_by
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from mmcompile.codegen.token_shards import shard_values
from mmcompile.errors import PlanError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.sizes import evaluate
from mmcompile.passes.context_parallel.context_parallel import ContextParallel
from mmcompile.passes.context_parallel.token_axis import LOCAL_TOKENS
from mmcompile.passes.values import tensors

RANKS, BLOCK = 2, 16


def _experts(block: Block, x: Tensor) -> Tensor:
    """Two experts of four for each token, one product per choice: what transformers calls batched_mm."""
    rows = x.reshape(-1, WIDTH)
    weights, chosen = rows[:, :4].softmax(-1).topk(2, dim=-1)
    picked = block.experts[chosen.reshape(-1)]
    out = torch.bmm(rows.repeat_interleave(2, dim=0).unsqueeze(1), picked).squeeze(1) * weights.reshape(-1, 1)
    return out.view(rows.shape[0], 2, WIDTH).sum(dim=1).view(x.shape)


def _dense_experts(block: Block, x: Tensor) -> Tensor:
    """All experts on all tokens, laid one behind the other."""
    rows = x.reshape(-1, WIDTH)
    scores = torch.full_like(rows[:, :4], -math.inf).scatter(1, rows[:, :4].topk(1, dim=1)[1], rows[:, :1]).sigmoid()
    every = rows.repeat(4, 1) * scores.transpose(0, 1).reshape(-1, 1)
    return torch.bmm(every.view(4, -1, WIDTH), block.experts).sum(0).view(x.shape)


def _through_layouts(block: Block, x: Tensor) -> Tensor:
    """Views that move tokens about and bring them back."""
    rows = x.permute(1, 0, 2).unsqueeze(2).squeeze(2).transpose(0, 1).reshape(-1, 2, WIDTH // 2)
    halves = torch.cat([rows[:, 1], rows[:, 0].neg()], -1)
    return torch.stack(halves.unflatten(0, (2, -1)).unbind(2), -1).expand(2, -1, WIDTH).contiguous()


def _along_features(block: Block, x: Tensor) -> Tensor:
    ranked = x.sort(-1)[0].cumsum(-1).flip(-1).log_softmax(-1) + F.glu(x.repeat(1, 1, 2), -1)
    return F.layer_norm(ranked, (WIDTH,)) + x.amax(-1, keepdim=True) + x.var(-1, keepdim=True) + x.argmax(-1)[..., None]


def _by_number(block: Block, x: Tensor) -> Tensor:
    """Lookups within a token, and of tables by token."""
    first = (
        x.gather(-1, x.argsort(-1)[..., :WIDTH])
        + x[..., [1, 0, 3, 2, 5, 4, 7, 6]]
        + x.index_select(2, torch.arange(WIDTH))
    )
    return first + F.embedding(x.argmax(-1), block.experts[0]) + F.one_hot(x.argmax(-1), WIDTH).to(x.dtype)


def _products(block: Block, x: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDTH)
    one = torch.addmm(block.out.bias, rows, block.experts[0]).view_as(x)
    return (
        one
        + (block.experts[1] @ x.transpose(1, 2)).transpose(1, 2)
        + x @ block.experts[2]
        + torch.mm(rows, block.experts[3]).view_as(x)
    )


def _whole_table(block: Block, x: Tensor) -> Tensor:
    """A value for every position, made in the block from parameters: it is spread where tokens meet it."""
    table = block.experts.reshape(-1, 1)[: x.shape[1]].repeat(2, 1)[: x.shape[1]]
    return x * F.pad(table, (0, 0, 0, x.shape[1] - table.shape[0])).expand(-1, WIDTH)


def _new_value(block: Block, x: Tensor) -> Tensor:
    """A new tensor in the dtype of x, for every token."""
    return x.new_ones(2, x.shape[1], 1) * x + F.dropout(x, 0.0, training=True) + F.pad(x[..., :-1], (0, 1))


FOLLOWED: dict[str, Mix] = {
    "experts": _experts,
    "dense experts": _dense_experts,
    "layouts": _through_layouts,
    "along features": _along_features,
    "by number": _by_number,
    "products": _products,
    "whole table": _whole_table,
    "new value": _new_value,
}

REFUSED: dict[str, tuple[Mix, str]] = {
    "cumsum": (lambda _, x: x.cumsum(1), "aten.cumsum in module layers.0 is not token-wise: it works along the tokens"),
    "flip": (lambda _, x: x.flip(1), "aten.flip in .* it works along the tokens"),
    "softmax": (lambda _, x: x.softmax(1), "aten.softmax in .* it works along the tokens"),
    "sort": (lambda _, x: x.sort(1)[0], "aten.sort in .* it works along the tokens"),
    "roll": (lambda _, x: x.roll(1, 1), "aten.roll in .* no rule says what it does to tokens"),
    "mean": (lambda _, x: x.mean(1, keepdim=True), "aten.mean in .* it reduces over the tokens"),
    "sum of all": (lambda _, x: x * x.sum(), "aten.sum in .* it reduces over the tokens"),
    "first token": (lambda _, x: x * x[:, :1], "aten.slice in .* it takes tokens 0 to 1 of 40"),
    "select": (lambda _, x: x.select(1, 0).unsqueeze(1), "aten.select in .* it takes single tokens"),
    "every other token": (
        lambda _, x: x[:, ::2].repeat_interleave(2, 1),
        "aten.slice in .* it takes tokens 0 to 40 of 40",
    ),
    "shift": (lambda _, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], "aten.pad in .* it pads the tokens"),
    "neighbours": (
        lambda _, x: F.pad(x[:, 1:] * x[:, :-1], (0, 0, 0, 1)),
        "aten.mul in .* its inputs do not hold the same tokens in the same dim",
    ),
    "more tokens": (lambda _, x: torch.cat([x, x], 1)[:, :40], "aten.cat in .* it puts more tokens behind the tokens"),
    "tokens by tokens": (
        lambda _, x: (x @ x.transpose(1, 2)) @ x,
        "aten.matmul in .* it sums over tokens or multiplies tokens with tokens",
    ),
    "sum by linear": (
        lambda _, x: F.linear(x.transpose(1, 2), x.new_ones(40, 40)).transpose(1, 2),
        "aten.linear in .* it sums over the tokens",
    ),
    "norm over tokens": (
        lambda _, x: F.layer_norm(x, (40, WIDTH)),
        "aten.layer_norm in .* it normalizes over the tokens",
    ),
    "convolution": (
        lambda _, x: F.conv1d(x.transpose(1, 2), x.new_ones(WIDTH, WIDTH, 3), padding=1).transpose(1, 2),
        "aten.conv1d in .* no rule says what it does to tokens",
    ),
    "tokens by number": (lambda _, x: x[:, torch.arange(39, -1, -1)], "aten.index in .* it picks tokens by number"),
    "index_select": (
        lambda _, x: x.index_select(1, torch.arange(40)),
        "aten.index_select in .* picks tokens by number",
    ),
    "gather": (lambda _, x: x.gather(1, x.argmax(-1, keepdim=True)), "aten.gather in .* it picks tokens by number"),
    "pairs of tokens": (
        lambda _, x: x.reshape(2, 20, 2 * WIDTH).relu().reshape(x.shape),
        r"aten.reshape in .* it splits \[2, 40, 8\] into \[2, 20, 16\] across tokens",
    ),
    "random numbers for all": (
        lambda b, x: x * F.dropout(b.experts[0, 0], 0.5, training=True),
        "aten.dropout in .* draws random numbers for a value that all ranks must agree on",
    ),
    "attention without words": (
        lambda _, x: F.scaled_dot_product_attention(x[:, None], x[:, None, :39], x[:, None, :39])[:, 0],
        "scaled_dot_product_attention in .* queries see other tokens; run the pass bitfield-attention first",
    ),
}


def _captured(mix: Mix) -> tuple[TinyLanguage, Capture]:
    torch.manual_seed(0)
    model = TinyLanguage(mix).double()
    return model, capture(model, tiny_batch())


def _jobs(mix: Mix) -> tuple[Job, Job]:
    model, found = _captured(mix)
    batch = tiny_batch()
    words = causal_words(batch)
    graph = with_words(found.graph)
    blocks = token_blocks([1, 1, 1], tokens=40, ranks=RANKS, block=BLOCK, policy=BlockPolicy.STRIPE)
    spread = ContextParallel(component="language_model", num_ranks=RANKS, local_tokens=blocks.local_tokens).run(graph)
    own = shard_values({WORDS: words}, blocks.order, {"cp_words": WORDS})
    return (
        job_of(replace(found, graph=spread), model, batch, own=own),
        job_of(replace(found, graph=graph), model, {**batch, WORDS: words}),
    )


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran]:
    """Every op that is followed, in one set of processes."""
    return ran_by({name: _jobs(mix) for name, mix in FOLLOWED.items()}, RANKS)


@pytest.mark.parametrize("name", FOLLOWED)
def test_ops_that_treat_tokens_alike_are_followed(ran: dict[str, Ran], name: str) -> None:
    ran[name].assert_equal()


@pytest.mark.parametrize("name", FOLLOWED)
def test_recorded_shapes_are_those_of_one_rank(name: str) -> None:
    _, found = _captured(FOLLOWED[name])
    graph = ContextParallel(component="language_model", num_ranks=RANKS, local_tokens=32).run(with_words(found.graph))
    nodes = [node for node in graph.module.graph.nodes if node.op in ("placeholder", "call_function")]
    recorded = {node: [tuple(t.shape) for t in tensors(node)] for node in nodes}
    inputs = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(graph.module, mode).propagate(*(torch.empty(v.shape, dtype=v.dtype) for v in inputs))
    assert recorded == {node: [tuple(t.shape) for t in tensors(node)] for node in nodes}
    for node in nodes:
        shape = [evaluate(size, {LOCAL_TOKENS: 32}) for size in node.meta.get("symbolic_shape", ())]
        assert not shape or tuple(shape) == recorded[node][0], node.name


@pytest.mark.parametrize("name", REFUSED)
def test_ops_that_mix_tokens_are_refused(name: str) -> None:
    mix, reason = REFUSED[name]
    _, found = _captured(mix)
    graph = with_words(found.graph)
    start = "context parallelism cannot spread the tokens of layer 1 of language_model (layers.0): "
    with pytest.raises(PlanError) as caught:
        ContextParallel(component="language_model", num_ranks=RANKS, local_tokens=32).run(graph)
    message = str(caught.value)
    assert message.startswith(start), message
    assert re.search(reason, message), message
    assert message.endswith("; plan this model without context parallelism")


def test_arithmetic_with_the_number_of_tokens_is_refused() -> None:
    torch.manual_seed(0)
    model = TinyLanguage(lambda _, x: x / x.shape[1]).double()
    found = capture(model, tiny_batch(40), dynamic=tiny_batch(48))
    with pytest.raises(
        PlanError, match=r"aten\.div in module layers\.0 is not token-wise: it computes with the number of tokens"
    ):
        ContextParallel(component="language_model", num_ranks=RANKS, local_tokens=32).run(with_words(found.graph))
