"""Implementations of one attention call, ours and others, behind one interface for timing."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from attention_timing import Call, run_backward, run_forward

from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan, TileLists
from mmcompile.kernels.bitfield_attention.masks.words import MAX_DOCUMENT, visible


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """An implementation bound to the tensors of a call."""

    name: str
    forward: Callable[[], torch.Tensor]
    backward: Callable[[], tuple[torch.Tensor, ...]]
    """dQ, dK, dV; runs the forward pass if `prepare_backward` did not."""
    prepare_backward: Callable[[], Callable[[], object]]
    """Run the forward pass; what it returns runs the backward pass alone, any number of times."""
    build_ms: float
    """To build what it makes of the mask."""

    def results(self) -> tuple[torch.Tensor, ...]:
        """O, dQ, dK, dV."""
        return self.forward().detach(), *self.backward()


def own(call: Call, device: str) -> Iterator[Peer]:
    """Ours, with splits where the plan finds them useful."""
    start = time.perf_counter()
    plan = call.plan()
    yield _own("bitfield", call, plan, 1e3 * (time.perf_counter() - start))


def own_ablations(call: Call, device: str) -> Iterator[Peer]:
    """Ours without one thing at a time."""
    plan, whole = call.plan(), call.plan(None)
    if plan.queries.num_slots or plan.keys.num_slots:
        yield _own("bitfield, never split", call, whole, 0.0)
    yield _own("bitfield, ROW as GENERAL", call, _map_lists(plan, _two_classes), 0.0)
    yield _own("bitfield, natural order", call, _map_lists(plan, _natural_order), 0.0)
    if call.case.tokens * (call.case.kv_tokens or call.case.tokens) <= 1 << 30:
        yield _own("bitfield, no tile skipped", call, _all_general(plan), 0.0)


def _own(name: str, call: Call, plan: BlockPlan, build_ms: float) -> Peer:
    def prepare() -> Callable[[], tuple[torch.Tensor, ...]]:
        out, lse = run_forward(call, plan)
        return lambda: run_backward(call, plan, out, lse)

    return Peer(
        name=name,
        forward=lambda: run_forward(call, plan)[0],
        backward=lambda: prepare()(),
        prepare_backward=prepare,
        build_ms=build_ms,
    )


def _map_lists(plan: BlockPlan, change: Callable[[TileLists], TileLists]) -> BlockPlan:
    return replace(plan, queries=change(plan.queries), keys=change(plan.keys))


def _two_classes(lists: TileLists) -> TileLists:
    items = lists.items.clone()
    items[:, 6], items[:, 5] = items[:, 4], items[:, 4]
    return replace(lists, items=items)


def _natural_order(lists: TileLists) -> TileLists:
    return replace(lists, items=lists.items[torch.argsort(lists.items[:, 0], stable=True)].contiguous())


def _all_general(plan: BlockPlan) -> BlockPlan:
    """Every tile visited and masked, as without any plan."""

    def lists(source: TileLists, others: int) -> TileLists:
        device, rows = source.items.device, len(source.bounds)
        other = torch.arange(others, dtype=torch.int32, device=device)
        items = torch.zeros(rows, 8, dtype=torch.int32, device=device)
        items[:, 0], items[:, 1], items[:, 7] = torch.arange(rows, device=device), -1, others
        bounds = items[:, [2, 4, 6, 7]].contiguous()
        return TileLists(bounds=bounds, other=other, items=items, splits=source.splits[:0], num_slots=0)

    blocks_q, blocks_kv = -(-plan.q_len // plan.block_q), -(-plan.kv_len // plan.block_kv)
    return replace(plan, queries=lists(plan.queries, blocks_kv), keys=lists(plan.keys, blocks_q))


def _autograd(name: str, call: Call, attend: Callable[..., torch.Tensor], build_ms: float, expand: bool) -> Peer:
    """A peer differentiated by autograd; `expand`: key heads are repeated beforehand, as it knows no groups."""
    group = call.case.heads // call.case.kv_heads if expand else 1
    k, v = (x.repeat_interleave(group, dim=1) for x in (call.k, call.v))
    leaves = [x.detach().requires_grad_() for x in (call.q, k, v)]

    def prepare() -> Callable[[], tuple[torch.Tensor, ...]]:
        out = attend(*leaves)
        return lambda: torch.autograd.grad(out, leaves, call.dout, retain_graph=True)

    def backward() -> tuple[torch.Tensor, ...]:
        dq, dk, dv = prepare()()
        return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))

    return Peer(
        name=name, forward=lambda: attend(*leaves), backward=backward, prepare_backward=prepare, build_ms=build_ms
    )


def sdpa_causal(call: Call, device: str) -> Iterator[Peer]:
    """SDPA with its causal flag: the upper bound for the causal mask."""
    yield _autograd(
        "SDPA is_causal", call, functools.partial(F.scaled_dot_product_attention, is_causal=True), 0.0, True
    )


def dense_sdpa(call: Call, device: str) -> Iterator[Peer]:
    """SDPA with a mask of tokens x keys."""
    start = time.perf_counter()
    words, positions, kv_words, kv_positions = call.mask
    chunks = zip(words.split(1024, 1), positions.split(1024, 1), strict=True)
    mask = torch.cat([visible(w, p, kv_words, kv_positions) for w, p in chunks], 1)[:, None]
    if device == "cuda":
        torch.cuda.synchronize()
    build_ms = 1e3 * (time.perf_counter() - start)
    yield _autograd(
        "SDPA, dense mask", call, functools.partial(F.scaled_dot_product_attention, attn_mask=mask), build_ms, True
    )


def flex(call: Call, device: str) -> Iterator[Peer]:
    """Compiled FlexAttention with the predicate on words, as two int32 tensors; masks of one shape share their graphs."""
    if device != "cuda":
        return  # It has no backward pass there.
    from torch.nn.attention.flex_attention import create_block_mask

    predicate, buffers = _flex_mask(*(x.shape[1] for x in call.mask[::2]))
    halves = [half for words in call.mask[::2] for half in words[0].view(torch.int32).unflatten(0, (-1, 2)).unbind(1)]
    for buffer, values in zip(buffers, [*halves, call.mask[1][0], call.mask[3][0]], strict=True):
        buffer.copy_(values)
    build = functools.partial(create_block_mask, predicate, None, None, call.q.shape[2], call.k.shape[2], device=device)
    compiled = _compiled_flex()
    build(_compile=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    block_mask = build(_compile=True)
    torch.cuda.synchronize()
    build_ms = 1e3 * (time.perf_counter() - start)
    attend = functools.partial(compiled, block_mask=block_mask, enable_gqa=call.case.heads != call.case.kv_heads)
    yield _autograd("compiled flex_attention", call, attend, build_ms, False)


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # pyright: ignore[reportReturnType]


@functools.cache
def _flex_mask(tokens: int, kv_tokens: int) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """A predicate and the tensors it reads, one for all masks of a shape: a new function would be compiled anew."""
    sizes = tokens, tokens, kv_tokens, kv_tokens, tokens, kv_tokens
    buffers = tuple(torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes)
    q_bits, q_high, k_bits, k_high, q_pos, k_pos = buffers

    def seen(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        differ = q_high[q] ^ k_high[k]
        causal = (q_high[q] < 0) & (q_pos[q] >= k_pos[k]) & ((q_bits[q] & k_bits[k]) != 0)
        island = ((differ & 0xFFFF) == 0) & ((k_high[k] & 0xFFFF) != 0)
        return ((differ & 0x7FFF0000) == 0) & ((k_high[k] & 0x7FFF0000) != 0) & (causal | island)

    return seen, buffers


def varlen(call: Call, device: str) -> Iterator[Peer]:
    """torch's varlen attention, on the one mask here that it can express: causal documents."""
    if device != "cuda" or importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return
    from torch.nn.attention.varlen import varlen_attn

    documents = (call.mask[0][0] >> 48) & MAX_DOCUMENT
    lengths = torch.unique_consecutive(documents, return_counts=True)[1]
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    causal = (
        {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    )
    longest = int(lengths.max())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        return varlen_attn(*rows, ends, ends, longest, longest, **causal).transpose(0, 1)[None]  # pyright: ignore

    yield _autograd("varlen_attn", call, attend, 0.0, True)
