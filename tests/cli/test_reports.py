"""What is said about a plan: explain, diff, check, simulate, stats. One plan of a tiny model serves all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.cli_run import CONFIGS, Run

from mmcompile.planner.plan.plan import Plan

TINY = str(CONFIGS / "llava-tiny.json")
TRAIN = ("--train", "projector")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a process of its own, for `run` is not there for modules."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    command = ("plan", TINY, *TRAIN, "--stages", "language_model=2", "--microbatches", "4", "-o", str(file))
    script = str(Path(sys.executable).parent / "mmcompile")
    subprocess.run([script, *command, "--projector", "with_encoder"], check=True, capture_output=True)
    return file


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Eight samples, one with many images."""
    file = tmp_path / "shapes.jsonl"
    lines = [{"name": f"s{index}", "text_tokens": 40 * (index + 1), "images": [4]} for index in range(7)]
    lines.append({"name": "album", "text_tokens": 300, "images": [4] * 31})
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_the_plan_in_json_has_what_scripts_need(run: Run, plan: Path) -> None:
    shown = run("show", plan, "--json").json
    assert {"components", "stages", "predicted", "templates", "rejected", "notes", "cuts"} <= shown.keys()
    assert {"iteration_s", "bubble", "lower_bound_s", "gap", "bubbles"} <= shown["predicted"].keys()
    stage = shown["stages"][0]
    assert {"name", "component", "layers", "devices", "tp", "cp", "dp", "fsdp"} <= stage.keys()
    assert stage["memory_bytes"].keys() == {"parameters", "gradients", "optimizer", "activations", "total"}


def test_explain_a_stage_from_the_file_alone(run: Run, plan: Path) -> None:
    told = run("explain", "language_model.1", "--plan", plan)
    assert told.code == 0, told.err
    assert told.out.startswith("stage language_model.1, on rank 2") and "the loss is here" in told.out
    one = run("explain", "language_model.1", "--plan", plan, "--json").json
    stage = Plan.load(plan).stage("language_model.1")
    assert one["memory_bytes"]["total"] == stage.prediction.total_bytes
    assert one["forward_s"] == stage.prediction.forward_s
    unknown = run("explain", "decoder.0", "--plan", plan)
    assert unknown.code == 1 and "names no layer or component" in unknown.err


def test_explain_a_layer_with_the_model(run: Run, plan: Path) -> None:
    told = run("explain", "model.language_model.layers.1", "--plan", plan, TINY, *TRAIN)
    assert told.code == 0, told.err
    assert "layer model.language_model.layers.1 is in stage language_model.0" in told.out
    assert "forward FLOP" in told.out and "*t" in told.out
    stale = run("explain", "language_model.1", "--plan", plan, TINY)
    assert stale.code == 1 and "the plan does not belong to this model" in stale.err
    useless = run("explain", "language_model.1", "--plan", plan, "--train", "all")
    assert useless.code == 1 and "no effect without MODEL" in useless.err


def test_diff(run: Run, plan: Path, tmp_path: Path) -> None:
    same = run("diff", plan, plan)
    assert same.code == 0 and same.out == "no difference\n"
    other = tmp_path / "other.json"
    raw = json.loads(plan.read_text())
    raw["num_microbatches"], raw["predicted"]["iteration_s"] = 8, 2 * raw["predicted"]["iteration_s"]
    other.write_text(json.dumps(raw))
    differing = run("diff", plan, other)
    assert differing.code == 0 and "microbatches: 4 -> 8" in differing.out and "(+100.0%)" in differing.out
    found = run("diff", plan, other, "--json").json
    assert [setting["name"] for setting in found["settings"]] == ["microbatches"]


def test_another_version_is_refused(run: Run, plan: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(plan.read_text().replace(f'"version": {json.loads(plan.read_text())["version"]}', '"version": 1'))
    for command in (("show", old), ("diff", plan, old), ("simulate", "--plan", old), ("explain", "x", "--plan", old)):
        refused = run(*command)
        assert refused.code == 1 and "has plan version 1, this mmcompile reads" in refused.err


def test_simulate(run: Run, plan: Path, tmp_path: Path) -> None:
    told = run("simulate", "--plan", plan)
    assert told.code == 0, told.err
    assert "iteration" in told.out and "language_model.1" in told.out and "idle" in told.out
    every = run("simulate", "--plan", plan, "--schedule", "all", "--json").json["schedules"]
    assert [one["schedule"] for one in every] == ["gpipe", "1f1b", "eager-1f1b", "zb-h1"]
    assert all(
        sum(share[cause] for cause in ("warm_up", "stages", "microbatches", "links")) < 1
        for share in every[1]["bubbles"]
    )
    compared = run("simulate", "--plan", plan, "--schedule", "all")
    assert "best" in compared.out
    more = run("simulate", "--plan", plan, "--microbatches", 16, "--json").json
    assert more["num_microbatches"] == 16 and more["bubble"] < every[1]["bubble"]
    picture, trace = tmp_path / "step.png", tmp_path / "step.json"
    assert run("simulate", "--plan", plan, "--emit", "png", "-o", picture, "--schedule", "zb-h1").code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("simulate", "--plan", plan, "--emit", "chrome", "-o", trace).code == 0
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_with_samples(run: Run, plan: Path, shapes: Path) -> None:
    drawn = run("simulate", TINY, "--plan", plan, "--stats", shapes, *TRAIN, "--json")
    assert drawn.code == 0, drawn.err
    assert drawn.json["num_microbatches"] == 4
    assert any(share["microbatches"] > 0 for share in drawn.json["bubbles"])


def test_check(run: Run, plan: Path, shapes: Path) -> None:
    checked = run("check", TINY, "--plan", plan, "--stats", shapes, *TRAIN)
    assert checked.code == 0, checked.err
    assert "vision_tower is frozen" in checked.out and "the heaviest microbatch fits" in checked.out
    shapes.write_text('{"name": "story", "text_tokens": 9000}')
    bad = run("check", TINY, "--plan", plan, "--stats", shapes, *TRAIN, "--json")
    assert bad.code == 1 and bad.json["ok"] is False and bad.err == ""
    problems = [finding["what"] for finding in bad.json["findings"] if finding["severity"] == "problem"]
    assert any("sample story makes 9000 tokens" in text for text in problems)
    assert any("has anything for multi_modal_projector, whose" in text for text in problems)


def test_check_makes_its_own_plan(run: Run) -> None:
    checked = run("check", TINY, *TRAIN, "--cluster", "1x4xH100")
    assert checked.code == 0, checked.err
    assert "straggler" in checked.out


def test_stats(run: Run, shapes: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    told = run("stats", shapes, "-o", file)
    assert told.code == 0, told.err
    assert "8 samples" in told.out and "album" in told.out
    again = run("stats", file, "--json").json
    assert again["count"] == 8 and "samples" not in again
    refused = run("stats", file, "--max-samples", 2)
    assert refused.code == 1 and "made already" in refused.err


def test_an_impossible_request_says_what_conflicts(run: Run) -> None:
    small = run("plan", TINY, *TRAIN, "--constrain", "memory:1KiB")
    assert small.code == 1 and "memory <= 1 KiB" in small.err and "Traceback" not in small.err
    many = run("plan", TINY, *TRAIN, "--stages", "multi_modal_projector=3")
    assert many.code == 1 and "multi_modal_projector" in many.err
