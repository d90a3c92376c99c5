"""A user's mistake: a message that says what to do, the right exit code, no traceback, nothing half-written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.cli_run import CONFIGS, Run

TINY = str(CONFIGS / "llava-tiny.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show nothing.json", r"cannot read plan nothing\.json: No such file or directory"),
        ("show toy.py", r"toy\.py is no plan: .*make it anew with `mmcompile plan`"),
        ("plan nothing", r"no model configuration at 'nothing': .*pass a config\.json"),
        ("plan toy:missing", r"toy:missing: module toy has no function 'missing'"),
        ("plan absent.module:build", r"absent\.module:build: no module named 'absent'"),
        ("plan toy:nothing", r"toy:nothing returned NoneType; wanted an nn\.Module, or \(nn\.Module, batch"),
        (f"plan {TINY} --train nope", r"train pattern 'nope' matches no parameter; use 'all', .*vision_tower"),
        (f"plan {TINY} --stages language_model", r"--stages 'language_model' is not NAME=N"),
        (f"plan {TINY} --stages a=1,a=2", r"--stages names 'a' twice: 1 and 2"),
        (f"plan {TINY} --stages language_model=99", r"language_model.*99"),
        (f"plan {TINY} --cluster 8xTPU", r"unknown device 'TPU'; known are .*H100"),
        (f"stages {TINY} --plan x.json --stages language_model=2", r"--stages has no effect together with --plan"),
        (f"stages {TINY} --plan x.json --context-parallel 2", r"--context-parallel has no effect together with --plan"),
        (
            f"plan {TINY} --context-parallel 2 --attention model",
            r"context_parallel 2 needs attention 'bitfield', got 'model'",
        ),
        (f"train {TINY} --data toy:build_samples", r"holds no weights for its config; add --random-weights"),
        ("train toy:build --data nowhere", r"no data 'nowhere': it is neither a folder nor package\.module:function"),
        ("train toy:build --data .", r"no samples in \.: wanted \.safetensors files"),
        ("train toy:build --data toy:build_samples --batch-size 2", r"--batch-size 2 is less than the 4 microbatches"),
        ("trace .", r"is no run folder: cannot read events\.json"),
        (f"plan {TINY} --tensor-parallel few", r"--tensor-parallel is 'few'; give a number from 1 on, or search"),
        (f"plan {TINY} --tensor-parallel 0", r"--tensor-parallel is '0'"),
        (f"plan {TINY} --replicas search", r"--replicas search has no effect without --global-batch"),
        (f"plan {TINY} --replicas few", r"--replicas is 'few'; give a number from 1 on, or search"),
        (
            f"plan {TINY} --replicas 2 --replicas 3",
            r"--replicas is given 2 and 3; give one number, or NAME=N for each chain",
        ),
        (f"plan {TINY} --replicas vision_tower=0", r"--replicas 'vision_tower=0' is not NAME=N with N at least 1"),
        (f"plan {TINY} --replicas a=1,a=2", r"--replicas names 'a' twice: 1 and 2"),
        (
            f"plan {TINY} --replicas language=2",
            r"no chain 'language' to give 2 replicas; chains and components are vision",
        ),
        (
            f"plan {TINY} --replicas 3 --cluster 1x4xH100",
            r"replicas language_model 3\) need 6 devices, got 4 of 1x4xH100; ask for fewer stages or replicas",
        ),
        (f"plan {TINY} --schedule search", r"--schedule search has no effect without --global-batch"),
        (f"plan {TINY} --stats synthetic:cocoqa", r"--stats has no effect without --global-batch"),
        (
            f"plan {TINY} --global-batch 8 --stats nowhere",
            r"cannot read a dataset from nowhere: wanted a folder of images",
        ),
        (
            f"plan {TINY} --global-batch 8 --stats synthetic:imagenet",
            r"no synthetic dataset 'imagenet'; there are .*cocoqa",
        ),
        (f"plan {TINY} --constrain near:a,b", r"constraint 'near:a,b' cannot be read: its forms are together"),
        (f"plan {TINY} --calibration nothing.json", r"cannot read calibration nothing\.json"),
        ("explain language_model.0 --plan nothing.json", r"cannot read plan nothing\.json"),
        ("diff nothing.json toy.py", r"cannot read plan nothing\.json"),
        (f"simulate {TINY} --plan x.json", r"MODEL and --stats go together"),
        ("simulate --plan x.json --emit png", r"--emit png needs --output FILE"),
        ("simulate --plan x.json --output x.png", r"--output is for --emit png or chrome"),
        ("simulate --plan x.json --emit chrome -o x.json --schedule all", r"name one schedule for --emit chrome"),
        ("step --plan nothing.json --stats synthetic:cocoqa:8", r"cannot read plan nothing\.json"),
        (
            "step --plan x.json --stats x --rows 3 --all",
            r"--rows has no effect together with --all: no bars are printed",
        ),
        ("step --plan nothing.json --stats x --balance best", r"no balancer 'best'; there are arrival, .*, auto"),
        ("stats nowhere", r"cannot read a dataset from nowhere"),
        ("stats synthetic:cocoqa --patch-size 16", r"have no effect on synthetic:cocoqa: it is no folder of images"),
        (f"check {TINY} --plan x.json --global-batch 8", r"--global-batch has no effect together with --plan"),
        (f"check {TINY} --plan nothing.json", r"cannot read plan nothing\.json"),
    ],
)
def test_problems(arguments: str, message: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    outcome = run(*arguments.split())
    assert re.search(message, outcome.err), outcome.err
    assert outcome.code == 1
    assert "Traceback" not in outcome.err and outcome.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            "",
            "plan",
            "nonsense",
            f"plan {TINY} --microbatches 0",
            f"plan {TINY} --nope",
            f"plan {TINY} --strategy best",
        ),
        *("diff a.json", "explain language_model.0", "simulate --plan x.json --schedule random", "stats", "check"),
        *("step --plan x.json", "step --stats synthetic:cocoqa", "step --plan x.json --stats x --step -1"),
    ],
)
def test_bad_usage_is_2(arguments: str, run: Run) -> None:
    outcome = run(*arguments.split())
    assert outcome.code == 2
    assert "Usage: mmcompile" in outcome.err + outcome.out


def test_json_errors_are_objects(run: Run) -> None:
    outcome = run("show", "nothing.json", "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["kind"] == "PlanError" and "nothing.json" in outcome.json["error"]["message"]


def test_unknown_family(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llava_of_tomorrow"}')
    outcome = run("plan", config)
    assert outcome.code == 1
    assert re.search(r"has model_type 'llava_of_tomorrow', which transformers .* does not know", outcome.err)
    folder = run("plan", tmp_path)
    assert folder.code == 1 and "llava_of_tomorrow" in folder.err


def test_full_disk(run: Run, tmp_path: Path) -> None:
    """A folder stands where the file should go: the same path through the code as a write that fails."""
    (tmp_path / "plan.json").mkdir()
    outcome = run("plan", TINY, "-o", tmp_path / "plan.json")
    assert outcome.code == 1 and "cannot write" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_debug_shows_where_and_a_typo_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCOMPILE_DEBUG", "1")
    assert "Traceback" in run("show", "nothing.json").err
    monkeypatch.setenv("MMCOMPILE_DEBUG", "loud")
    typo = run("show", "nothing.json")
    assert typo.code == 1 and "MMCOMPILE_DEBUG is 'loud'" in typo.err


def test_the_installed_script_runs() -> None:
    script = Path(sys.executable).parent / "mmcompile"
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("plan", "check", "show", "explain", "diff", "simulate", "stats"))
