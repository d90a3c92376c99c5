"""`mmcompile step`: one step of a plan, balanced. One plan of a tiny model serves all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.oracles.balance_oracle import assignment_in
from support.processes.cli_run import CONFIGS, Run

from mmcompile.batching.balance.registry import BALANCERS
from mmcompile.planner.plan.balance_groups import towers
from mmcompile.planner.plan.plan import Plan

DATA = "synthetic:chartqa:64"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas of everything, the encoder on devices of its own. Of a process of its own, for `run` is not there for
    modules."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    command = [
        *("plan", str(CONFIGS / "llava-tiny.json"), "--cluster", "1x4xH100", "--stats", DATA, "--global-batch", "32"),
        *("--replicas", "2", "--microbatches", "4", "--placement", "disjoint", "-o", str(file)),
    ]
    subprocess.run([str(Path(sys.executable).parent / "mmcompile"), *command], check=True, capture_output=True)
    return file


def test_text(run: Run, plan: Path) -> None:
    told = run("step", "--plan", plan, "--stats", DATA)
    assert told.code == 0, told.err
    assert told.out.startswith(f"step 0 of {plan}, seed 0: 32 samples of {DATA}\n")
    assert "vision_tower 2 replicas, language_model 2 replicas; 4 microbatches each" in told.out
    assert re.search(r"straggler seconds +\S+ m?u?s +\S+ m?u?s +\S+ m?u?s saved", told.out)
    assert len(re.findall(r"^ +[01]\.[0-3]  .*█", told.out, re.MULTILINE)) == 2 * 2 * 4
    fewer = run("step", "--plan", plan, "--stats", DATA, "--rows", 3)
    assert len(re.findall(r"^ +[01]\.[0-3]  .*█", fewer.out, re.MULTILINE)) == 2 * 3
    assert fewer.out.count("and 5 more, none above") == 2


def test_json(run: Run, plan: Path) -> None:
    told = run("step", "--plan", plan, "--stats", DATA, "--json")
    assert told.code == 0, told.err
    found = told.json
    known = {"plan", "data", "seed", "step", "samples", "num_microbatches", "asked", "balancer", "reason", "components"}
    assert found.keys() == known | {"simulated_s", "straggler_s", "assignment"}
    assert [component["name"] for component in found["components"]] == list(towers(Plan.load(plan)))
    assert found["simulated_s"]["after"] <= found["simulated_s"]["before"]
    assert found["straggler_s"]["saved"] == found["straggler_s"]["before"] - found["straggler_s"]["after"] > 0
    assignment = assignment_in(found["assignment"])
    assert assignment.num_samples == found["samples"] == Plan.load(plan).global_batch


def test_the_same_step_is_the_same_text_and_another_is_another(run: Run, plan: Path, tmp_path: Path) -> None:
    command = ("step", "--plan", plan, "--stats", DATA, "--json", "--png")
    first, again = run(*command, tmp_path / "a.png"), run(*command, tmp_path / "b.png")
    assert first.out.replace("a.png", "b.png") == again.out
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and first.json["output"].endswith("a.png")
    loads = [first.json["components"][-1]["loads_before"]]
    for option in ("--step", "--seed"):
        other = run("step", "--plan", plan, "--stats", DATA, "--json", option, 1)
        loads.append(other.json["components"][-1]["loads_before"])
    assert loads[0] != loads[1] != loads[2] != loads[0]


def test_every_balancer_by_name(run: Run, plan: Path) -> None:
    told = run("step", "--plan", plan, "--stats", DATA, "--all")
    assert told.code == 0, told.err
    assert "replica.microbatch" not in told.out and all(name in told.out for name in BALANCERS)
    table = {
        row["name"]: row for row in run("step", "--plan", plan, "--stats", DATA, "--all", "--json").json["balancers"]
    }
    assert table.keys() == BALANCERS.keys()
    for name in ("arrival", "joint", "hierarchical-all"):
        one = run("step", "--plan", plan, "--stats", DATA, "--balance", name, "--json").json
        assert one["asked"] == one["balancer"] == name
        assert one["simulated_s"]["after"] == table[name]["simulated_s"]
    still = run("step", "--plan", plan, "--stats", DATA, "--balance", "arrival").out
    assert re.search(r"^arrival: takes as long as arrival order$", still, re.MULTILINE)


def test_more_samples_than_the_plan_or_the_dataset_has(run: Run, plan: Path) -> None:
    assert run("step", "--plan", plan, "--stats", DATA, "--samples", 100, "--json").json["samples"] == 100


def test_a_step_without_images(run: Run, plan: Path, tmp_path: Path) -> None:
    """Fine for a step; a dataset without any is not the one that the plan is for."""
    shapes = tmp_path / "shapes.jsonl"
    text = [json.dumps({"name": f"s{index}", "text_tokens": 40 + index}) for index in range(200)]
    shapes.write_text("\n".join([*text, json.dumps({"name": "cat", "text_tokens": 9, "images": [4]})]))
    told = run("step", "--plan", plan, "--stats", shapes, "--samples", 4, "--json")
    assert told.code == 0, told.err
    assert [component["samples"] for component in told.json["components"]] == [0, 4]
    shapes.write_text("\n".join(text))
    refused = run("step", "--plan", plan, "--stats", shapes)
    assert refused.code == 1
    assert "has anything for vision_tower, which the plan has devices for" in refused.err


def test_problems(run: Run, plan: Path, tmp_path: Path) -> None:
    nowhere = run("step", "--plan", plan, "--stats", tmp_path / "nowhere.json")
    assert nowhere.code == 1 and "cannot read dataset statistics" in nowhere.err
    many = run("step", "--plan", plan, "--stats", DATA, "--balance", "node-local")
    assert many.code == 1 and "node-local balances steps of one microbatch, not of 4" in many.err
    (tmp_path / "step.png").mkdir()
    unwritable = run("step", "--plan", plan, "--stats", DATA, "--png", tmp_path / "step.png")
    assert unwritable.code == 1 and "cannot write" in unwritable.err and unwritable.out == ""


def test_a_plan_that_does_not_know_what_samples_cost(run: Run, plan: Path, tmp_path: Path) -> None:
    """Made by an older version."""
    raw = json.loads(plan.read_text())
    del raw["sample_rates"]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(raw))
    refused = run("step", "--plan", old, "--stats", DATA)
    assert refused.code == 1 and re.search(r"make it anew with `mmcompile plan`", refused.err), refused.err
