"""The demo, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import EXAMPLES

from mmcompile.planner.plan.plan import Plan

DEMO = EXAMPLES / "digits_llava.py"


@pytest.mark.slow
def test_demo_reads_digits_and_leaves_its_files(tmp_path: Path) -> None:
    out = tmp_path / "demo_out"
    (out / "stages").mkdir(parents=True)
    (out / "stages" / "of_an_earlier_run.py").write_text("")
    done = subprocess.run([sys.executable, "-P", str(DEMO), "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert (
        metrics["accuracy"] >= 0.95
        and metrics["processes"] == 5
        and len(metrics["recoveries_s"]) == 2
        and metrics["steps"] > 0
        and metrics["loss"] < 0.5
    )
    names = {path.name for path in out.iterdir()}
    assert names == {"plan.json", "stages", "run", "timeline.png", "trace.json", "metrics.json"}
    planned = {stage.name for stage in Plan.load(out / "plan.json").stages}
    assert {path.stem for path in (out / "stages").iterdir()} == planned


@pytest.mark.slow
def test_a_killed_worker_does_not_change_a_bit(tmp_path: Path) -> None:
    for name, options in (("killed", ()), ("calm", ("--calm",))):
        command = [sys.executable, "-P", str(DEMO), "--out", str(tmp_path / name), *options]
        assert subprocess.run(command, capture_output=True).returncode == 0
    killed, calm = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("killed", "calm"))
    assert len(killed["recoveries_s"]) == 2 and not calm["recoveries_s"]
    assert killed["accuracy"] == calm["accuracy"] and killed["loss"] == calm["loss"]
    digests = [(tmp_path / name / "run" / "digests.json").read_text() for name in ("killed", "calm")]
    assert digests[0] == digests[1]
