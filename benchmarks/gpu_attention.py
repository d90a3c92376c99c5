"""Bitfield attention on one GPU against compiled FlexAttention, SDPA and varlen attention, on the same masks.

    python -P benchmarks/gpu_attention.py [--budget-s 360] [--out DIR]     the comparison: table last, JSON in DIR
    python -P benchmarks/gpu_attention.py --tune [--budget-s 150]          rank tile sizes of our kernels
    python -P benchmarks/gpu_attention.py --dry                            all steps at tiny sizes on the CPU; no figures

Ceilings come first, then errors in bfloat16 against float64, then times, the most wanted rows first; rows for which the budget
of wall time is too short are named as skipped. TFLOP/s count the visible pairs only: 4 A H D forward, 10 A H D backward, A pairs.
Times are medians by CUDA events on random data with the cache flushed; backward is timed alone. One card per table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

from attention_peers import Peer, dense_sdpa, flex, own, own_ablations, sdpa_causal, varlen
from attention_timing import (
    DOCUMENTS,
    Budget,
    Case,
    Tiles,
    compile_all,
    make_call,
    poisoned,
    run_backward,
    run_forward,
    time_ms,
)

from mmcompile.kernels.bitfield_attention import bitfield_attention_reference

MOST_RELATIVE_ERROR = 1e-2
"""Norm of the error over norm of the reference, in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A case and the implementations timed on it, in order; `seconds` is what one of them may need, compilation included."""

    case: Case
    peers: tuple[Callable[..., Iterator[Peer]], ...]
    seconds: float = 8.0


@dataclass(kw_only=True, slots=True)
class Results:
    """Everything measured, as it goes into the JSON."""

    device: str
    versions: dict[str, str]
    ceilings: dict[str, float] = field(default_factory=dict)
    errors: list[dict[str, object]] = field(default_factory=list)
    rows: list[dict[str, object]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields, indent=1)


def rows(dry: bool) -> list[Row]:
    """Cases in the order they are timed."""
    long, longer, local, dim, heads = (256, 512, 128, 64, (4, 1)) if dry else (32768, 65536, 8192, 128, (32, 8))

    def case(mask: str, tokens: int = long, head_dim: int = dim, kv_tokens: int | None = None) -> Case:
        many, few = (4, 1) if kv_tokens else heads
        return Case(mask=mask, tokens=tokens, heads=many, kv_heads=few, head_dim=head_dim, kv_tokens=kv_tokens)

    return [
        Row(case=case("causal"), peers=(own, sdpa_causal, flex), seconds=60),
        Row(case=case("EE"), peers=(own, flex, own_ablations)),
        Row(case=case("MP"), peers=(own, flex, own_ablations)),
        Row(case=case("EE"), peers=(dense_sdpa,), seconds=15),
        Row(case=case("causal", local, kv_tokens=longer), peers=(own, own_ablations)),
        Row(case=case("EE", local, kv_tokens=longer), peers=(own, own_ablations)),
        Row(case=case("MP-Gemma"), peers=(own, flex)),
        Row(case=case("EE-Gemma"), peers=(own, flex)),
        Row(case=case("EP"), peers=(own, flex)),
        Row(case=case("causal", head_dim=64), peers=(own, sdpa_causal), seconds=8),
        Row(case=case("EE", head_dim=64), peers=(own,)),
        Row(case=case(DOCUMENTS), peers=(own, varlen), seconds=15),
        Row(case=case("EE", longer), peers=(own,)),
        Row(case=case("MP", longer), peers=(own,)),
        Row(case=case("MP", local), peers=(own,)),
    ]


def measure_ceilings(device: str, dry: bool) -> dict[str, float]:
    """What the card does at best here: matrix product in bfloat16, and copy counting bytes read and written."""
    side, count = (64, 1 << 12) if dry else (8192, 1 << 31)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    product_ms = time_ms(lambda: a @ b, device)
    copy_ms = time_ms(lambda: target.copy_(source), device)
    return {"matmul_flops_per_s": 2e3 * side**3 / product_ms, "copy_bytes_per_s": 2e3 * count / copy_ms}


def check(device: str, dry: bool) -> Iterator[dict[str, object]]:
    """Errors of forward and backward against float64, next to those of SDPA in the same dtype; outputs poisoned with NaN."""
    tokens, heads, dims = (192, (2, 1), (64,)) if dry else (1500, (8, 2), (128, 64, 256, 96))
    for head_dim in dims:
        for mask in ("causal", "EE", "MP"):
            call = make_call(
                Case(mask=mask, tokens=tokens, heads=heads[0], kv_heads=heads[1], head_dim=head_dim), device
            )
            wide = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
            truth = bitfield_attention_reference(wide[0], wide[1], wide[2], *call.mask)[0]
            truth.backward(call.dout.double())
            expected = truth.detach(), *(x.grad for x in wide)
            for cap in (None, 4):
                plan = call.plan(cap)
                with poisoned():
                    out, lse = run_forward(call, plan)
                    got = out, *run_backward(call, plan, out, lse)
                errors = [_error(x, y) for x, y in zip(got, expected, strict=True)]
                peer = next(dense_sdpa(call, device))
                peer_errors = [_error(x, y) for x, y in zip(peer.results(), expected, strict=True)]
                allowed = [min(MOST_RELATIVE_ERROR, 1.5 * e + 1e-5) for e in peer_errors]
                passed = all(e <= most for e, most in zip(errors, allowed, strict=True))  # False for NaN
                yield {"case": call.case.name, "cap": cap, "errors": errors, "sdpa": peer_errors, "passed": passed}


def _error(got: torch.Tensor, expected: torch.Tensor | None) -> float:
    assert expected is not None
    return float((got.double() - expected).norm() / expected.norm())


def time_row(row: Row, device: str, budget: Budget, results: Results) -> None:
    """Time every implementation of a row, while the budget lasts."""
    if budget.left_s < row.seconds:
        results.skipped.append(row.case.name)
        return
    call = make_call(row.case, device)
    for make_peers in row.peers:
        if budget.left_s < row.seconds:
            results.skipped.append(f"{row.case.name}: {make_peers.__name__}")
            continue
        for peer in make_peers(call, device):
            forward_ms = time_ms(peer.forward, device)
            backward_ms = time_ms(peer.prepare_backward(), device)
            entry: dict[str, object] = {
                "case": row.case.name,
                "what": peer.name,
                "forward_ms": forward_ms,
                "forward_tflops_per_s": call.flops(2) / forward_ms / 1e9,
                "backward_ms": backward_ms,
                "backward_tflops_per_s": call.flops(5) / backward_ms / 1e9,
                "build_ms": peer.build_ms,
            }
            results.rows.append(entry)
            print(_line(entry), flush=True)


_HEADING = f"{'':44} {'':26} {'forward':>22} {'backward':>22} {'mask':>9}\n{'case':44} {'implementation':26}" + (
    f"{'ms':>11} {'TFLOP/s':>11}" * 2 + f" {'ms':>9}"
)


def _line(entry: dict[str, object]) -> str:
    times = "".join(
        f"{entry[f'{way}_ms']:>11.3f} {entry[f'{way}_tflops_per_s']:>11.1f}" for way in ("forward", "backward")
    )
    return f"{entry['case']:44} {entry['what']:26}{times} {entry['build_ms']:>9.1f}"


def compare(budget: Budget, dry: bool) -> Results:
    """All of it, in order."""
    device = "cpu" if dry else "cuda"
    name = "CPU, dry run: no figures" if dry else torch.cuda.get_device_name()
    results = Results(device=name, versions={"torch": torch.__version__, "python": sys.version.split()[0]})
    results.ceilings = measure_ceilings(device, dry)
    print(name, results.versions, results.ceilings, flush=True)
    if not dry:
        failures = compile_all([(Tiles(), dim, group) for dim in (128, 64, 256, 96) for group in (4,)], 90)
        print(f"kernels compiled, {[x for x in failures if x]} failed; {budget.left_s:.0f} s left", flush=True)
    for error in check(device, dry):
        results.errors.append(error)
        print("errors", error, flush=True)
    for row in rows(dry):
        time_row(row, device, budget, results)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget-s", type=float, help="wall time, 360 s; 150 s with --tune")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--tune", action="store_true", help="rank tile sizes instead")
    parser.add_argument("--dry", action="store_true", help="run all steps on the CPU at tiny sizes")
    options = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(0)
    if options.tune:
        from gpu_attention_tune import tune

        text, failed = json.dumps(tune(options.budget_s or 150), indent=1), False
    else:
        results = compare(Budget.of(options.budget_s or 360), options.dry)
        text, failed = results.as_json(), not all(error["passed"] for error in results.errors)
        print(f"\n{results.device}, torch {results.versions['torch']}, {time.monotonic() - start:.0f} s")
        print({name: f"{value:.4g}" for name, value in results.ceilings.items()})
        print(f"{sum(bool(e['passed']) for e in results.errors)} of {len(results.errors)} checks passed")
        print("skipped:", "; ".join(results.skipped) or "nothing")
        print(_HEADING, *map(_line, results.rows), sep="\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / ("tune.json" if options.tune else "gpu_attention.json")).write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
