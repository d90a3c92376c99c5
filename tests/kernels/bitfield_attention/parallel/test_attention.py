"""Ranks that share a sequence compute what one process does, in real gloo processes; the shard ops; and the head stride."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportReturnType=false, reportArgumentType=false
# torch.distributed re-exports its C++ classes without saying so, and their stubs lack a few members and base classes.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.oracles.token_policies import BlockPolicy
from support.processes.attention_ranks import Case, Result, blocks_of, in_one_process, on_ranks, tensors_of, words_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmcompile.errors import ConfigError, MaskError
from mmcompile.kernels.bitfield_attention import visible_pairs
from mmcompile.kernels.bitfield_attention.ops import bitfield_attention_op
from mmcompile.kernels.bitfield_attention.parallel.attention import (
    context_parallel_attention,
    gather_words,
)
from mmcompile.kernels.bitfield_attention.parallel.head_exchange import KeySums, gathered_heads
from mmcompile.kernels.bitfield_attention.parallel.head_stride import (
    AttentionRates,
    RankAttention,
    attention_s,
    choose_head_stride,
)
from mmcompile.kernels.bitfield_attention.parallel.token_ops import shard_tokens, unshard_tokens
from mmcompile.kernels.process_groups import Channel, register_group

PACKED = ("MP", "MP-Gemma")
CASES = {
    "packed documents": Case(kinds=PACKED),
    "causal": Case(kinds=("causal",), tokens=128),
    "images that see only themselves": Case(kinds=("EE",)),
    "images that see what is before them": Case(kinds=("EE-Gemma",)),
    "prepended encoder": Case(kinds=("EP",)),
    "video and prefix": Case(kinds=("video", "prefix")),
    "padding, and tokens out of order": Case(kinds=("padded", "permuted"), tokens=177),
    "window": Case(kinds=("causal", "MP-Gemma"), window=11),
    "fewer tokens than ranks times a block": Case(kinds=("EE-Gemma",), tokens=19),
    "one token": Case(kinds=("causal",), tokens=1),
    "all heads at once": Case(kinds=PACKED, head_stride=0),
    "two of five heads at a time": Case(kinds=PACKED, heads=5, kv_heads=5, head_stride=2),
    "eight query heads a key head": Case(kinds=("EE",), heads=16, kv_heads=2),
    "one key head": Case(kinds=("EE",), heads=4, kv_heads=1),
    "seven key heads, one at a time": Case(kinds=("EE",), heads=7, kv_heads=7),
    "values of another dim": Case(kinds=("EE",), value_dim=5),
    "keys and values do not train": Case(kinds=PACKED, trains="q"),
    "only keys train": Case(kinds=PACKED, trains="k"),
    "only values train": Case(kinds=PACKED, trains="v"),
    "compiled": Case(kinds=PACKED, compiled=True),
    **{f"float32, {kind}": Case(kinds=(kind,), dtype=torch.float32) for kind in ("causal", "EE", "MP-Gemma")},
    "bfloat16": Case(kinds=PACKED, dtype=torch.bfloat16),
    **{f"policy {policy}": Case(kinds=PACKED, policy=policy) for policy in BlockPolicy},
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Results of all ranks, by case."""

    num_ranks: int
    results: dict[str, list[Result]]


@pytest.fixture(scope="module", params=(2, pytest.param(4, marks=pytest.mark.slow)), ids=("2_ranks", "4_ranks"))
def ran(request: pytest.FixtureRequest) -> Ran:
    """Every case, in one set of processes."""
    results = on_ranks(list(CASES.values()), request.param)
    return Ran(num_ranks=request.param, results=dict(zip(CASES, results, strict=True)))


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_does(ran: Ran, name: str) -> None:
    case, results = CASES[name], ran.results[name]
    whole, tolerance = in_one_process(case), TOLERANCES[case.dtype]
    restore = blocks_of(case, ran.num_ranks).restore()

    def check(got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance)

    check(torch.cat([result.out for result in results], 2)[:, :, restore], whole.out)
    check(torch.cat([result.lse for result in results], 2)[:, :, restore], whole.lse)
    assert {result.out.dtype for result in results} == {case.dtype}
    for key, wanted in whole.gradients.items():
        check(torch.stack([result.gradients[key] for result in results]).sum(0), wanted)


@pytest.mark.parametrize("name", ("packed documents", "policy lpt_free", "one token"))
def test_free_rows_see_nothing(ran: Ran, name: str) -> None:
    blocks = blocks_of(CASES[name], ran.num_ranks)
    for rank, result in enumerate(ran.results[name]):
        free = blocks.order[rank] < 0
        assert not result.out[:, :, free].any()
        assert (result.lse[:, :, free] == -torch.inf).all()


def test_one_rank_is_plain_attention() -> None:
    case = replace(CASES["packed documents"], dtype=torch.float32)
    tensors, (words, positions) = tensors_of(case), words_of(case)
    q, k, v = (tensors[name] for name in "qkv")
    masks = words, positions, words, positions
    plain = bitfield_attention_op(q, k, v, *masks, 0.4, None, "auto")
    shared = context_parallel_attention(q, k, v, *masks, 0.4, None, 0, "unknown", 1)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out, _ in (plain, shared)]
    assert all(torch.equal(x, y) for x, y in zip((*plain, *grads[0]), (*shared, *grads[1]), strict=True))
    assert all(map(torch.equal, gather_words(words, positions, "unknown", 1), (words, positions)))


def test_flops_count_visible_pairs() -> None:
    case = CASES["values of another dim"]
    tensors, (words, positions) = tensors_of(case), words_of(case)
    with FlopCounterMode(display=False) as counter:
        out, _ = context_parallel_attention(
            *(tensors[name] for name in "qkv"), words, positions, words, positions, 0.4, None, 0, "", 1
        )
        out.sum().backward()
    pairs = case.heads * visible_pairs(words, positions)
    assert counter.get_total_flops() == 2 * pairs * (case.dim + case.value_dim) + 2 * pairs * (
        3 * case.dim + 2 * case.value_dim
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"group": "nobody"}, ConfigError, "no process group is registered as 'nobody'.*call register_group first"),
        ({"group": "alone"}, ConfigError, "'alone' has 1 ranks, and the call is for 2"),
        ({"stride": 3}, ConfigError, "head_stride is 3, and there are 2 key/value heads; wanted 1 to 2, or 0 for all"),
        ({"stride": -1}, ConfigError, "head_stride is -1"),
        (
            {"kv_tokens": 15},
            MaskError,
            r"kv_words are \[1, 15\], wanted \[1, 16\]: those of the 8 tokens of each of 2 ranks",
        ),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    group = alone()
    register_group("alone", group)
    q, k, v = (torch.zeros(1, heads, 8, 4) for heads in (2, 2, 2))
    words = torch.ones(1, 8, dtype=torch.int64)
    kv_words = torch.ones(1, options.get("kv_tokens", 16), dtype=torch.int64)
    with pytest.raises(error, match=message):
        context_parallel_attention(
            *(q, k, v, words, words, kv_words, kv_words, 1.0, None),
            *(options.get("stride", 0), options.get("group", "alone"), 2),
        )


def test_a_group_is_forgotten_with_its_owner() -> None:
    group = alone()
    register_group("gone", group)
    del group
    words = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(ConfigError, match="no process group is registered as 'gone'"):
        gather_words(words, words, "gone", 2)


def alone() -> dist.ProcessGroup:
    """A gloo group of this process only."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)


def test_heads_stay_readable_while_the_next_are_gathered() -> None:
    k, v = torch.randn(2, 5, 6, 3), torch.randn(2, 5, 6, 4)
    channel = Channel(alone(), k.device)
    before = None
    for heads, keys, values in gathered_heads(channel, k, v, 2, 1):
        if before is not None:
            assert torch.equal(before[1], k[:, before[0]])
        assert torch.equal(keys, k[:, heads]) and torch.equal(values, v[:, heads])
        before = heads, keys.clone()
    assert before is not None and before[0] == slice(4, 5)


def test_sums_arrive_whatever_their_number() -> None:
    for stride in (1, 2, 7):
        k, v = torch.randn(2, 7, 6, 3, dtype=torch.float16), torch.randn(2, 7, 6, 4, dtype=torch.float16)
        sums = KeySums(Channel(alone(), k.device), k, v, stride, 1, torch.float32)
        for first in range(0, 7, stride):
            heads = slice(first, min(first + stride, 7))
            sums.add(heads, k[:, heads].float(), v[:, heads].float())
        dk, dv = sums.result()
        assert torch.equal(dk, k) and torch.equal(dv, v)


@pytest.mark.gpu
def test_streams_wait_for_each_other() -> None:
    """One rank over NCCL: messages are packed, and buffers read, late; neither stream may run ahead of the other."""
    device = torch.device("cuda")
    group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    channel = Channel(group, device)
    k, v = (torch.randn(2, 9, 4096, 64, device=device) for _ in range(2))
    sums, seen = KeySums(channel, k, v, 1, 1, torch.float32), []
    for heads, keys, values in gathered_heads(channel, k, v, 1, 1):
        torch.cuda._sleep(10_000_000)
        seen.append((heads, keys.clone(), values.clone()))
        sums.add(heads, 2 * keys, 3 * values)
    for heads, keys, values in seen:
        assert torch.equal(keys, k[:, heads]) and torch.equal(values, v[:, heads])
    dk, dv = sums.result()
    assert torch.equal(dk, 2 * k) and torch.equal(dv, 3 * v)


INDEX = torch.tensor([4, 2, -1, 0, 8])


def test_opcheck_of_shard_ops() -> None:
    whole, part = torch.randn(2, 9, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    torch.library.opcheck(shard_tokens, (whole, INDEX, 1, 0))
    torch.library.opcheck(shard_tokens, (whole.detach(), INDEX, -2, -torch.inf))
    torch.library.opcheck(shard_tokens, (torch.arange(9), INDEX, 0, -100))
    torch.library.opcheck(shard_tokens, (torch.ones(1, 9, dtype=torch.bool), INDEX, 1, False))
    torch.library.opcheck(unshard_tokens, (part, INDEX, 1, 9))


def test_labels_keep_their_kind_and_free_rows_are_filled() -> None:
    labels = shard_tokens(torch.arange(9)[None], INDEX, 1, -100)
    assert labels.tolist() == [[4, 2, -100, 0, 8]] and labels.dtype == torch.int64


def test_gradients_of_ranks_add_up_to_the_whole() -> None:
    x = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(9, 2, dtype=torch.float64)
    parts = torch.tensor([[4, 2, -1, 0, 8], [1, 3, 5, 6, 7]])
    terms = [(shard_tokens(x, index, 0, 7.5) * shard_tokens(weights, index, 0, 3)).sum() for index in parts]
    (gradient,) = torch.autograd.grad(torch.stack(terms).sum(), x)
    torch.testing.assert_close(gradient, weights, rtol=0, atol=0)


def test_unshard_puts_tokens_back_among_zeros() -> None:
    x = torch.arange(1.0, 10)
    back = unshard_tokens(shard_tokens(x, INDEX, 0, torch.nan), INDEX, 0, 9)
    assert back.tolist() == [1, 0, 3, 0, 5, 0, 0, 0, 9]


def test_shard_ops_have_derivatives_of_derivatives() -> None:
    x = torch.randn(9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: shard_tokens(x, INDEX, 0, 0).sin(), x)
    assert torch.autograd.gradgradcheck(lambda x: shard_tokens(x, INDEX, 0, 0).sin(), x)


RATES = AttentionRates(flops_per_s=4e14, bytes_per_s=300e9, latency_s=2e-5)
CALL = RankAttention(
    num_ranks=8, batch=1, local_tokens=8192, num_heads=32, num_kv_heads=8, head_dim=128, tiles=[256] * 64
)


def test_many_heads_at_once_fill_a_fast_link_and_few_hide_a_slow_one() -> None:
    assert choose_head_stride(CALL, RATES) >= 2
    assert choose_head_stride(CALL, replace(RATES, bytes_per_s=40e9)) == 1


def test_high_latency_asks_for_few_collectives() -> None:
    assert choose_head_stride(CALL, replace(RATES, latency_s=0.1)) == 8


def test_one_rank_has_nothing_to_hide() -> None:
    assert choose_head_stride(replace(CALL, num_ranks=1, tiles=[1]), RATES) == 8


def test_the_chosen_stride_divides_and_is_the_best() -> None:
    call = replace(CALL, num_heads=12, num_kv_heads=6)
    best = choose_head_stride(call, RATES)
    assert attention_s(call, RATES, best) == min(attention_s(call, RATES, stride) for stride in (1, 2, 3, 6))
    with pytest.raises(ConfigError, match="head_stride 4 does not divide the 6 key/value heads"):
        attention_s(call, RATES, 4)


def test_attention_never_takes_less_than_its_work_or_its_messages() -> None:
    flops = 3.5 * 4 * 128 * 32 * 128**2 * sum(CALL.tiles)
    received = 7 * 8192 * 8 * 2 * 128 * (2 + 2 + 4)
    for stride in (1, 2, 4, 8):
        seconds = attention_s(CALL, RATES, stride)
        assert seconds >= flops / RATES.flops_per_s
        assert attention_s(CALL, replace(RATES, bytes_per_s=1e9), stride) >= received / 1e9
