"""Folders of the checkout that tests read or run from."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"
CONFIGS = EXAMPLES / "configs"
