"""`benchmarks/compile_time.py`: the least of several runs counts, and what is over a limit is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
compile_time: Any = import_module("compile_time")


def starts(cold: list[float], warm: list[float]) -> Any:
    spent = ([compile_time.Spent(wall_s=9 * s, cpu_s=s, graphs=4) for s in seconds] for seconds in (cold, warm))
    return compile_time.Starts(**dict(zip(("cold", "warm"), spent, strict=True)))


@pytest.mark.parametrize(
    ("deep", "words"),
    [
        (starts([31.0, 14.0], [6.0, 2.0]), []),
        (starts([15.5, 16.0], [2.0, 2.0]), ["32 layers take 1.55 times as long as 4, over 1.5"]),
        (starts([12.0, 30.0], [6.0, 9.0]), ["with a cache 32 layers take 0.50 of the time without, over 0.33"]),
    ],
)
def test_the_least_of_all_runs_is_held_against_the_limits(deep: Any, words: list[str]) -> None:
    assert compile_time.failures({4: starts([10.0, 50.0], [1.0, 20.0]), 32: deep}) == words


def test_processor_time_counts_processes_that_have_ended() -> None:
    before = compile_time.processor_s()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert compile_time.processor_s() - before > 0.3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_start_with_a_cache_compiles_less(tmp_path: Path) -> None:
    cold, warm = (compile_time.in_fresh_process(2, tmp_path) for _ in range(2))
    assert cold.graphs == warm.graphs == 4
    assert warm.cpu_s < cold.cpu_s
