"""Rank tile sizes of the Triton kernels: compile candidates in parallel processes, then time each on two masks.

Prints, per kernel and head dim, candidates by the time of both masks together. The time of a backward candidate is that of the
whole backward pass, its other kernel as shipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attention_timing import Budget, Call, Case, Tiles, compile_all, make_call, run_backward, run_forward, time_ms

from mmcompile.kernels.bitfield_attention.impl.triton_configs import Config, Kernel
from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan

_MASKS = ("causal", "EE")
_TOKENS = 16384
_HEADS, _KV_HEADS = 32, 8
_COMPILE_SHARE = 0.6

# block_m, block_n, block_g, warps, stages and, where not 1, passes
_CANDIDATES: dict[tuple[Kernel, int], list[tuple[int, ...]]] = {
    ("forward", 128): [
        (128, 128, 64, 8, 2),
        (128, 64, 64, 8, 3),
        (128, 64, 64, 8, 4),
        (128, 64, 32, 8, 2),
        (64, 64, 64, 4, 2),
        (64, 64, 32, 4, 3),
        (64, 128, 64, 4, 2),
        (128, 32, 32, 4, 3),
        (128, 32, 32, 8, 4),
    ],
    ("query_gradients", 128): [
        (128, 64, 32, 8, 3),
        (128, 64, 32, 8, 2),
        (128, 64, 64, 8, 2),
        (128, 128, 32, 8, 2),
        (64, 64, 32, 4, 2),
        (64, 64, 64, 8, 2),
        (64, 128, 32, 8, 2),
    ],
    ("key_gradients", 128): [
        (64, 64, 32, 8, 2),
        (64, 64, 32, 8, 3),
        (32, 128, 16, 8, 2),
        (32, 128, 16, 8, 3),
        (64, 128, 32, 8, 2),
        (64, 128, 16, 8, 2),
        (64, 128, 32, 8, 3),
        (32, 64, 16, 4, 2),
        (32, 64, 16, 4, 3),
        (64, 64, 32, 4, 2),
        (64, 128, 32, 8, 2, 2),
        (64, 64, 32, 4, 2, 2),
    ],
    ("forward", 64): [
        (128, 128, 32, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 2),
        (128, 64, 64, 8, 3),
        (128, 64, 64, 4, 3),
        (128, 64, 64, 4, 2),
        (64, 64, 64, 4, 3),
        (64, 128, 64, 4, 2),
    ],
    ("query_gradients", 64): [
        (128, 64, 64, 8, 3),
        (128, 128, 64, 8, 2),
        (64, 64, 32, 4, 3),
        (64, 64, 64, 4, 2),
        (64, 128, 64, 4, 2),
    ],
    ("key_gradients", 64): [
        (64, 128, 64, 8, 2),
        (64, 128, 64, 8, 3),
        (128, 128, 64, 8, 2),
        (64, 64, 32, 4, 2),
        (64, 64, 64, 4, 3),
        (32, 64, 32, 4, 3),
    ],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    kernel: Kernel
    head_dim: int
    numbers: tuple[int, ...]

    @property
    def tiles(self) -> Tiles:
        names = "block_m", "block_n", "block_g", "num_warps", "num_stages", "passes"
        return Tiles(**{self.kernel: Config(**dict(zip(names, self.numbers, strict=False)))})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """A mask to time on, with what backward needs."""

    call: Call
    plan: BlockPlan

    def times_ms(self, candidate: _Candidate) -> float:
        if candidate.kernel == "forward":
            return time_ms(lambda: run_forward(self.call, self.plan, candidate.tiles), "cuda", repeats=8, most_s=0.3)
        out, lse = run_forward(self.call, self.plan)
        return time_ms(
            lambda: run_backward(self.call, self.plan, out, lse, candidate.tiles), "cuda", repeats=5, most_s=0.3
        )


def tune(budget_s: float) -> list[dict[str, object]]:
    """Time all candidates within a budget of wall time and print the ranking; returns its rows."""
    budget = Budget.of(budget_s)
    candidates = [
        _Candidate(kernel=kernel, head_dim=dim, numbers=numbers)
        for (kernel, dim), rows in _CANDIDATES.items()
        for numbers in rows
    ]
    jobs = [(Tiles(), dim, _HEADS // _KV_HEADS) for dim in (128, 64)]
    jobs += [(candidate.tiles, candidate.head_dim, _HEADS // _KV_HEADS) for candidate in candidates]
    failures = compile_all(jobs, budget_s * _COMPILE_SHARE)[2:]
    print(
        f"compiled {sum(x is None for x in failures)} of {len(candidates)} candidates; {budget.left_s:.0f} s left",
        flush=True,
    )
    rows = list(_measure(list(zip(candidates, failures, strict=True)), budget))
    for kernel, dim in _CANDIDATES:
        print(f"\n{kernel}, head dim {dim}: (block_m, block_n, block_g, warps, stages)   " + "   ".join(_MASKS))
        found = [row for row in rows if (row["kernel"], row["head_dim"]) == (kernel, dim)]
        for row in sorted(found, key=lambda row: row.get("total_ms", float("inf"))):  # pyright: ignore[reportCallIssue, reportArgumentType]
            print(f"  {row['tiles']!s:28}  {row.get('text', row.get('failure'))}")
    return rows


def _measure(candidates: list[tuple[_Candidate, str | None]], budget: Budget) -> Iterator[dict[str, object]]:
    problems: dict[int, list[_Problem]] = {}
    for candidate, failure in candidates:
        row: dict[str, object] = {
            "kernel": candidate.kernel,
            "head_dim": candidate.head_dim,
            "tiles": candidate.numbers,
        }
        if failure is None and budget.left_s < 3:
            failure = "skipped: the budget is spent"
        if failure is not None:
            yield {**row, "failure": failure}
            continue
        if candidate.head_dim not in problems:
            problems[candidate.head_dim] = [_problem(mask, candidate.head_dim) for mask in _MASKS]
        products = 2 if candidate.kernel == "forward" else 5
        times = [problem.times_ms(candidate) for problem in problems[candidate.head_dim]]
        rates = [p.call.flops(products) / t / 1e9 for p, t in zip(problems[candidate.head_dim], times, strict=True)]
        text = "   ".join(f"{t:7.3f} ms {rate:5.0f} TFLOP/s" for t, rate in zip(times, rates, strict=True))
        yield {**row, "times_ms": times, "tflops_per_s": rates, "total_ms": sum(times), "text": text}


def _problem(mask: str, head_dim: int) -> _Problem:
    call = make_call(Case(mask=mask, tokens=_TOKENS, heads=_HEADS, kv_heads=_KV_HEADS, head_dim=head_dim), "cuda")
    return _Problem(call=call, plan=call.plan())
