"""`mmcompile passes`: the order at once and without torch; passes over a model; options without effect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT
from support.processes.cli_run import Run

SCRIPT = """
import sys
from mmcompile.cli.main import main
sys.argv = ["mmcompile", "passes", "--json"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_the_order_is_printed_without_torch() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [own["name"] for own in found["planning"]][-1] == "cost"
    assert [own["name"] for own in found["stages"]].index("context-parallel") < 7
    assert all(own["reason"] for own in (*found["planning"], *found["stages"]))
    (flow,) = [own for own in found["passes"] if own["name"] == "gradient-flow"]
    assert (flow["ensures"], flow["used in"]) == (["gradient-flow"], ["planning", "stages"])


def test_passes_over_a_model(run: Run, tiny: Path) -> None:
    outcome = run("passes", tiny, "--train", "projector", "--run", "modality-dag,gradient-flow", "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert found["passes"] == "modality-dag,gradient-flow"
    results = dict(found["results"])
    assert "branch: vision_tower -> multi_modal_projector -> language_model" in results["modality-dag"]
    assert "4 of 4 trainable parameters receive one" in results["gradient-flow"]


def test_options_of_a_model_need_one(run: Run) -> None:
    outcome = run("passes", "--run", "cost")
    assert outcome.code == 1 and "--run has no effect without MODEL" in outcome.err
