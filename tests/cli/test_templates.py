"""Templates on the command line: planned, shown, compared, and played over a trace of nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.cli_run import CONFIGS, Run

from mmcompile.planner.plan.plan import Plan

TINY = str(CONFIGS / "llava-tiny.json")
OPTIONS = ("--train", "projector", "--projector", "with_encoder", "--text-tokens", "32", "--cluster", "6x1xcpu")
TRACE = "".join(f"0,add,node{node}\n" for node in range(6)) + (
    "600000,remove,node2\n900000,add,node6\n1500000,remove,node0\n1800000,remove,node6\n3600000,add,node7\n"
)
COUNTS = "0,6\n0.5,6\n0.5,5\n2,5\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `plan.json`, what planning printed as `printed.json`, and two traces."""
    folder = tmp_path_factory.mktemp("templates")
    script = str(Path(sys.executable).parent / "mmcompile")
    command = (script, "plan", TINY, *OPTIONS, "--fault-tolerance", "1", "-o", "plan.json", "--json")
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "printed.json").write_bytes(done.stdout)
    (folder / "trace.csv").write_text(TRACE)
    (folder / "counts.csv").write_text(COUNTS)
    return folder


def test_plan_and_show(run: Run, files: Path) -> None:
    printed = json.loads((files / "printed.json").read_text())
    plan = Plan.load(files / "plan.json")
    assert plan.resilience is not None
    assert printed["timing"]["templates_s"] > 0
    assert printed["fault_tolerance"] == 1
    assert printed["cover"] == "any 4..6 nodes can be used in full; below 4 training stops"
    assert [template["nodes"] for template in printed["templates"]] == [2, 3, 4]
    first = printed["templates"][0]
    assert first.keys() == {"nodes", "stages", "slowest_s", "fill_s", "gap"}
    assert [stage["chain"] for stage in first["stages"]] == ["vision_tower", "language_model"]
    assert [stage["devices"] for stage in first["stages"]] == [[0], [1]]
    assert first["slowest_s"] == max(stage["seconds"] for stage in first["stages"])

    shown = run("show", files / "plan.json")
    assert shown.code == 0, shown.err
    assert str(plan) in shown.out
    assert "resilience   fault tolerance 1: any 4..6 nodes can be used in full" in shown.out
    assert "templates    2 nodes: 2 stages of 1 device, slowest " in shown.out
    again = run("show", files / "plan.json", "--json").json
    assert again == {key: value for key, value in printed.items() if key != "timing"}


def test_diff_with_a_plan_without_templates(run: Run, files: Path) -> None:
    raw = json.loads((files / "plan.json").read_text())
    raw["resilience"] = None
    (files / "bare.json").write_text(json.dumps(raw))
    told = run("diff", files / "plan.json", files / "bare.json")
    assert told.code == 0, told.err
    assert told.out.startswith("templates fault tolerance: 1 -> -\n")
    assert "2 nodes: 2 stages of 1 device, slowest " in told.out
    found = run("diff", files / "bare.json", files / "plan.json", "--json").json
    assert found["templates"][0] == {"name": "fault tolerance", "before": "-", "after": "1"}
    bare = run("show", files / "bare.json", "--json").json
    assert (bare["fault_tolerance"], bare["cover"], bare["templates"]) == (None, None, [])

    refused = run("simulate", "--plan", files / "bare.json", "--trace", files / "trace.csv")
    assert refused.code == 1
    assert re.search(r"bare\.json has no templates.*`mmcompile plan --fault-tolerance F`", refused.err)


def test_replay_a_trace(run: Run, files: Path) -> None:
    command = ("simulate", "--plan", files / "plan.json", "--trace", files / "trace.csv")
    told = run(*command)
    assert told.code == 0, told.err
    assert told.out.startswith("trace.csv: 1 h 00 min, up to 6 nodes, 3 lost, 2 new; fault tolerance 1\n")
    rows = {line.split("  ")[0] for line in told.out.splitlines()}
    assert {"templates", "checkpoint-restart", "redundant computation"} <= rows
    assert "assumed: new nodes work after 45.0 s" in told.out and "note:" not in told.out

    picture = files / "trace.png"
    drawn = run(*command, "--emit", "png", "-o", picture, "--json")
    assert drawn.code == 0, drawn.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert drawn.json["output"] == str(picture) and drawn.json["notes"] == []
    ours, *others = drawn.json["systems"]
    assert ours["name"] == "templates" and ours["lost_samples"] == 0
    assert ours["samples"] > max(other["samples"] for other in others)
    # 4 nodes are left at the least: training never stops, and a step has 8 microbatches of 2 samples.
    assert ours["seconds"]["stopped"] == 0 and ours["samples"] % 16 == 0


def test_replay_counts_needs_their_unit(run: Run, files: Path) -> None:
    command = ("simulate", "--plan", files / "plan.json", "--trace", files / "counts.csv")
    assert "name the unit" in run(*command).err
    hours = run(*command, "--trace-unit", "hours", "--json").json
    assert hours["duration_s"] == 7200 and hours["num_removed"] == 1
    assert run(*command, "--trace-unit", "seconds", "--json").json["duration_s"] == 2
    useless = run("simulate", "--plan", files / "plan.json", "--trace", files / "trace.csv", "--trace-unit", "hours")
    assert useless.code == 1 and "says its unit itself" in useless.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schedule 1f1b --trace x", "--schedule has no effect together with --trace"),
        ("--microbatches 8 --trace x", "--microbatches has no effect together with --trace"),
        ("--batch-size 2 --trace x", "--batch-size has no effect together with --trace"),
        ("--train all --trace x", "--train has no effect together with --trace"),
        ("MODEL --stats y --trace x", "MODEL has no effect together with --trace"),
        ("--trace x --emit chrome -o y", "--emit chrome shows a step"),
        ("--trace x --emit png", "--emit png needs --output FILE"),
        ("--trace-unit hours", "--trace-unit has no effect without --trace"),
    ],
)
def test_what_has_no_effect_on_a_trace_is_refused(arguments: str, message: str, run: Run) -> None:
    outcome = run("simulate", "--plan", "nothing.json", *arguments.split())
    assert outcome.code == 1 and message in outcome.err and outcome.out == ""


def test_a_trace_that_cannot_be_read(run: Run, files: Path) -> None:
    outcome = run("simulate", "--plan", files / "plan.json", "--trace", "nowhere.csv")
    assert outcome.code == 1 and "cannot read trace nowhere.csv" in outcome.err


def test_too_few_nodes_say_what_would_do(run: Run) -> None:
    small = run("plan", TINY, *OPTIONS[:-1], "3x1xcpu", "--fault-tolerance", 1)
    assert small.code == 1
    assert "the cluster has 3: use 4 nodes, or a fault tolerance of 0" in small.err
    assert run("plan", TINY, "--fault-tolerance", -1).code == 2
