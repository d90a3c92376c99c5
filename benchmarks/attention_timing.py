"""What the attention benchmarks share: cases, the implementations that run them, and the clock."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from attention_masks import benchmark_mask

from mmcompile.kernels.bitfield_attention.impl import eager
from mmcompile.kernels.bitfield_attention.impl import triton_launch as triton
from mmcompile.kernels.bitfield_attention.impl.triton_configs import Config
from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan, plan_blocks, visible_pairs
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords, document, pack

DOCUMENTS = "documents"
"""The documents of MP, causal text throughout."""

_FLUSHED_BYTES = 1 << 28
"""Written between two timed runs, so that none finds its inputs in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A mask and the shape of one call; `kv_tokens` above `tokens`: the first of several ranks of context parallelism."""

    mask: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_tokens: int | None = None

    @property
    def name(self) -> str:
        keys = f" of {self.kv_tokens}" if self.kv_tokens else ""
        return f"{self.mask} {self.tokens}{keys}, heads {self.heads}:{self.kv_heads}, dim {self.head_dim}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Tensors of a case on the device, and the exact number of visible pairs."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    mask: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    pairs: int

    def flops(self, products: int) -> float:
        """Of `products` matrix products over the visible pairs: 2 forward, 5 backward."""
        return 2.0 * products * self.pairs * self.case.heads * self.case.head_dim

    def plan(self, cap: int | None | str = "auto") -> BlockPlan:
        return plan_blocks(*self.mask, cap=cap, heads_per_launch=self.case.heads)  # pyright: ignore[reportArgumentType]


def make_call(case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Random tensors for a case. Ranks take every (kv_tokens / tokens)-th block, which balances a causal mask."""
    words, positions = benchmark_mask("MP" if case.mask == DOCUMENTS else case.mask, case.kv_tokens or case.tokens, 0)
    if case.mask == DOCUMENTS:
        text = torch.ones_like(words)
        words = pack(causal=text.bool(), document=document(words), instance=0 * text, modalities=text)
    mask = words, positions, words, positions
    if case.kv_tokens:
        share = torch.arange(case.kv_tokens).unflatten(0, (-1, 128))[:: case.kv_tokens // case.tokens].flatten()
        mask = words[:, share], positions[:, share], words, positions
    shapes = [
        (case.heads, case.tokens),
        *[(case.kv_heads, case.kv_tokens or case.tokens)] * 2,
        (case.heads, case.tokens),
    ]
    q, k, v, dout = (torch.randn(1, *shape, case.head_dim, device=device, dtype=dtype) for shape in shapes)
    pairs = visible_pairs(*mask)
    on_device = tuple(x.contiguous().to(device) for x in mask)
    return Call(case=case, q=q, k=k, v=v, dout=dout, mask=on_device, pairs=pairs)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Configurations of the three kernels; None is the shipped one."""

    forward: Config | None = None
    query_gradients: Config | None = None
    key_gradients: Config | None = None


def run_forward(call: Call, plan: BlockPlan, tiles: Tiles | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours: Triton on CUDA, eager elsewhere."""
    scale = call.case.head_dim**-0.5
    if not call.q.is_cuda:
        return eager.forward(call.q, call.k, call.v, MaskWords(*call.mask), scale, plan)
    return triton.forward(
        call.q, call.k, call.v, MaskWords(*call.mask), scale, plan, tiles=tiles.forward if tiles else None
    )


def run_backward(
    call: Call, plan: BlockPlan, out: torch.Tensor, lse: torch.Tensor, tiles: Tiles | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ours: Triton on CUDA, eager elsewhere."""
    tensors = call.dout, None, call.q, call.k, call.v, out, lse, MaskWords(*call.mask), call.case.head_dim**-0.5, plan
    if not call.q.is_cuda:
        return eager.backward(*tensors)
    tiles = tiles or Tiles()
    return triton.backward(*tensors, query_tiles=tiles.query_gradients, key_tiles=tiles.key_gradients)


@dataclass(frozen=True, slots=True)
class Budget:
    """Wall time that may be spent, from when this was made."""

    end: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()


def time_ms(function: Callable[[], object], device: str, *, repeats: int = 20, most_s: float = 2.0) -> float:
    """Median time of a call, by CUDA events with the cache flushed before each; at least 3 repeats, then at most `most_s`."""
    if device != "cuda":
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    function()
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
    times: list[float] = []
    while len(times) < repeats and (len(times) < 3 or sum(times) < 1e3 * most_s):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory torch hands out holds NaN, so that an element no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _compile(tiles: Tiles, head_dim: int, group: int) -> str | None:
    """Compile by running a tiny case; the message of the error if that fails."""
    call = make_call(Case(mask="EE", tokens=256, heads=group, kv_heads=1, head_dim=head_dim), "cuda")
    plan = call.plan(cap=1)
    try:
        out, lse = run_forward(call, plan, tiles)
        if tiles.forward is None or tiles.query_gradients or tiles.key_gradients:
            run_backward(call, plan, out, lse, tiles)
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:  # Out of shared memory or registers: no candidate.
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return None


def compile_all(jobs: Sequence[tuple[Tiles, int, int]], most_s: float) -> list[str | None]:
    """Fill Triton's cache on disk from parallel processes, each job being tiles, head dim and heads of a group.

    Returns:
        Per job None, or why it cannot be used.
    """
    workers = min(len(jobs), max(1, multiprocessing.cpu_count() - 1))
    deadline = time.monotonic() + most_s
    results: list[str | None] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:  # Leaving it ends its processes.
        waiting = [pool.apply_async(_compile, job) for job in jobs]
        for result in waiting:
            try:
                results.append(result.get(timeout=max(0.1, deadline - time.monotonic())))
            except multiprocessing.TimeoutError:
                results.append("not compiled in time")
    return results
