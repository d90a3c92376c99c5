"""The demo, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "digits_llava.py"


@pytest.mark.slow
def test_demo_reads_digits_and_leaves_its_files(tmp_path: Path) -> None:
    out = tmp_path / "demo_out"
    (out / "stages").mkdir(parents=True)
    (out / "stages" / "of_an_earlier_run.py").write_text("")
    done = subprocess.run([sys.executable, "-P", str(DEMO), "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["accuracy"] >= 0.95 and metrics["processes"] >= 3 and metrics["steps"] > 0 and metrics["loss"] < 0.5
    names = {path.name for path in out.iterdir()}
    assert names == {"plan.json", "stages", "timeline.png", "trace.json", "metrics.json"}
    assert sorted(path.stem for path in (out / "stages").iterdir()) == [
        "language_model.0",
        "language_model.1",
        "vision_tower.0",
    ]
