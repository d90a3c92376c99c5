"""Real sizes are planned from their configs within the promised time and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.paths import BENCHMARKS

BENCHMARK = BENCHMARKS / "real_size.py"


@pytest.mark.slow
def test_real_sizes_are_planned_within_their_limits() -> None:
    done = subprocess.run([sys.executable, "-P", str(BENCHMARK)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
