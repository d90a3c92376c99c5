"""Capture and plan models of real size from their configs, without weights: seconds and memory (`make bench`).

Each model is planned by the command line in a process of its own, so that the figures are what a user sees. Exits with 1 if one
takes longer or more memory than its limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIGS = Path(__file__).resolve().parent.parent / "examples" / "configs"
MAX_BYTES = 1_500_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, what of it trains, and the longest it may take."""

    config: str
    train: tuple[str, ...]
    where: tuple[str, ...]
    """Options for cluster and batch."""
    limit_s: float
    search_limit_s: float | None = None
    """Of the search alone, after capture and costs."""

    @property
    def name(self) -> str:
        return f"{self.config} on {self.where[1]}, {' + '.join(self.train)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What planning one model took."""

    seconds: float
    """Of the whole command, imports included."""
    search_s: float
    peak_bytes: int
    stages: int
    iteration_s: float
    """Predicted."""


SMALL = ("--cluster", "2x8xA100-80G")
LARGE = ("--cluster", "8x8xA100-80G", "--global-batch", "512")
HUGE = ("--cluster", "128x8xH100", "--global-batch", "512")
CASES = (
    Case(config="llava-1.5-7b", train=("projector",), where=SMALL, limit_s=30),
    Case(config="qwen2.5-vl-7b", train=("projector",), where=SMALL, limit_s=30),
    Case(config="llava-onevision-72b", train=("projector",), where=LARGE, limit_s=60),
    Case(config="llava-onevision-72b", train=("all",), where=LARGE, limit_s=60),
    Case(config="qwen2.5-vl-72b", train=("projector",), where=LARGE, limit_s=120),
    Case(config="qwen2.5-vl-72b", train=("all",), where=LARGE, limit_s=120),
    Case(config="mllm-84b", train=("projector", "audio_tower.proj"), where=LARGE, limit_s=120),
    Case(config="mllm-84b", train=("all",), where=LARGE, limit_s=120),
    Case(config="llava-onevision-72b", train=("all",), where=HUGE, limit_s=60, search_limit_s=2),
)


def measure(case: Case) -> Figures:
    """Plan once. Raises RuntimeError with the command's own words if it fails."""
    script = Path(sys.executable).parent / "mmcompile"
    arguments = [*case.where, *(word for pattern in case.train for word in ("--train", pattern)), "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        [str(script), "plan", str(CONFIGS / f"{case.config}.json"), *arguments], capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"planning {case.name} failed: {done.stderr.strip()}")
    plan = json.loads(done.stdout)
    return Figures(
        seconds=seconds,
        search_s=plan["timing"]["search_s"],
        peak_bytes=plan["timing"]["peak_rss_bytes"],
        stages=len(plan["stages"]),
        iteration_s=plan["predicted"]["iteration_s"],
    )


def main() -> int:
    """Measure every case and print the table; 0 if all are within their limits."""
    table = Table("model", "seconds", "limit s", "search s", "peak GB", "limit GB", "stages", "predicted step s")
    good = True
    for case in CASES:
        figures = measure(case)
        good = good and figures.seconds <= case.limit_s and figures.peak_bytes <= MAX_BYTES
        good = good and (case.search_limit_s is None or figures.search_s <= case.search_limit_s)
        sizes = (f"{figures.peak_bytes / 1e9:.2f}", f"{MAX_BYTES / 1e9:.2f}")
        rest = (str(figures.stages), f"{figures.iteration_s:.3f}")
        table.add_row(
            case.name, f"{figures.seconds:.1f}", f"{case.limit_s:.0f}", f"{figures.search_s:.2f}", *sizes, *rest
        )
    Console(width=150).print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
