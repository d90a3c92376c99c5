"""The commands one after another, as a user would: plan, show, stages, train, trace."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file
from support.processes.cli_run import Run

from mmcompile.cli.data import epochs, load_samples, richest
from mmcompile.planner.plan.plan import Plan

TWO = ("--stages", "language_model=2", "--projector", "with_encoder", "--microbatches", 2)
STAGES = ["vision_tower.0", "language_model.0", "language_model.1"]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand beside `toy.py`, which `toy:build` then names."""
    monkeypatch.chdir(Path(__file__).parent)


def test_plan_show_and_stages(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = run("plan", tiny, *TWO, "--train", "projector", "-o", file, "--json")
    assert made.code == 0, made.err
    assert [stage["name"] for stage in made.json["stages"]] == STAGES
    phases = {"build_s", "capture_s", "cost_s", "search_s", "links_s"}
    assert made.json["timing"].keys() == phases | {"peak_rss_bytes"}
    plan = Plan.load(file)
    assert [stage.name for stage in plan.stages] == STAGES

    table = run("show", file)
    assert table.code == 0 and str(plan) in table.out and "│ vision_tower.0 @ rank 0" in table.out
    shown = run("show", file, "--json").json
    assert shown == {key: value for key, value in made.json.items() if key != "timing"}

    svg = run("stages", file, "--emit", "svg")
    assert ElementTree.fromstring(svg.out).tag.endswith("svg")
    assert run("stages", file, "--emit", "dot").out.startswith("digraph plan {")
    assert run("stages", file).out in table.out

    model = ("stages", tiny, "--plan", file, "--train", "projector")
    source = run(*model, "--stage", "language_model.1", "--emit", "source")
    assert source.code == 0, source.err
    compile(source.out, "language_model.1", "exec")
    assert "class Stage(StageModule)" in source.out
    inside = run(*model, "--stage", "language_model.1", "--json").json
    assert inside.keys() == {"language_model.1"} and "model.language_model.norm" in inside["language_model.1"]
    written = run(*model, "--emit", "source", "-o", tmp_path / "stages")
    assert written.code == 0
    assert sorted(path.stem for path in (tmp_path / "stages").iterdir()) == sorted(STAGES)


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (("--replicas", "2"), [2, 2]),
        (("--replicas", "language_model=2", "--replicas", "vision_tower=3"), [3, 2]),
        (("--replicas", "language_model=1,vision_tower=2"), [2, 1]),
    ],
)
def test_plan_with_replicas(
    replicas: tuple[str, ...], expected: list[int], run: Run, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    made = run("plan", tiny, "--cluster", "1x8xH100", "--projector", "with_encoder", *replicas, "-o", file)
    assert made.code == 0, made.err
    assert [chain.dp for chain in Plan.load(file).chains] == expected
    assert all(f"dp {number}" in made.out for number in expected)
    assert ("x 2 replicas" in made.out) == (expected[-1] == 2)


def test_plan_with_shared_tokens(run: Run, tiny: Path) -> None:
    outcome = run("plan", str(tiny), "--context-parallel", "2", "--cluster", "1x4xH100", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["attention"] == "bitfield"
    shared = [stage for stage in outcome.json["stages"] if stage["component"] == "language_model"]
    assert shared and all(stage["cp"] == len(stage["devices"]) == 2 for stage in shared)


def test_stale_plan_is_refused(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run("plan", tiny, *TWO, "-o", file).code == 0
    frozen = run("stages", tiny, "--plan", file, "--train", "projector", "--emit", "source")
    assert frozen.code == 1 and "the plan does not belong to this model" in frozen.err
    file.write_text(file.read_text()[:200])
    cut = run("show", file)
    assert cut.code == 1 and "is no plan" in cut.err


@pytest.mark.usefixtures("here")
def test_train_and_trace(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = run(
        *("train", "toy:build", "--data", "toy:build_samples", "--microbatches", 2, "--batch-size", 4),
        *("--steps", 3, "--lr", 0.01, "--out", out, "--save", tmp_path / "checkpoint", "--export", tmp_path / "model"),
        "--json",
    )
    assert trained.code == 0, trained.err
    assert trained.json["steps"] == 3 and trained.json["samples"] == 12 and 0 < trained.json["loss"] < 10
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert [trained.json[name] for name in ("checkpoint", "model")] == [
        str(tmp_path / "checkpoint"),
        str(tmp_path / "model"),
    ]
    plan = Plan.load(out / "plan.json")
    assert sorted(path.stem for path in (out / "stages").iterdir()) == sorted(stage.name for stage in plan.stages)

    traced = run("trace", out)
    assert traced.code == 0, traced.err
    assert "measured" in traced.out and "predicted" in traced.out
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((out / "trace.json").read_text())["traceEvents"]
    measured = [r for r in records if r["ph"] == "X" and r["pid"] < 1000]
    assert len(measured) >= 2 * 2 * len(plan.stages), "a forward and a backward for each stage and microbatch"
    assert run("trace", out, "-o", tmp_path / "elsewhere", "--json").json["measured"]["step_s"] > 0


@pytest.mark.usefixtures("here")
def test_plan_of_a_function_with_its_own_batch(run: Run) -> None:
    made = run("plan", "toy:build_with_batch", "--json")
    assert made.code == 0, made.err
    assert made.json["model"] == "Captioner"


@pytest.mark.usefixtures("here")
def test_check_compares_gradients_with_eager_if_asked(run: Run, tiny: Path) -> None:
    compared = run("check", "toy:build_with_batch", "--numeric")
    assert compared.code == 0, compared.err
    assert "loss differs from eager by 0.0e+00, gradients of 11 parameters by at most 0.0e+00" in compared.out
    refused = run("check", tiny, "--numeric")
    assert refused.code == 1 and "was built from its config, without weights" in refused.err


def test_samples_from_a_folder(tmp_path: Path) -> None:
    for index in range(3):
        extra = {"pixel_values": torch.zeros(1, 4)} if index == 2 else {}
        save_file({"input_ids": torch.full((1, 2), index), **extra}, tmp_path / f"{index}.safetensors")
    samples = load_samples(str(tmp_path))
    assert [torch.as_tensor(sample["input_ids"]).flatten().tolist() for sample in samples] == [[0, 0], [1, 1], [2, 2]]
    assert "pixel_values" in richest(samples, 1)[0]


def test_every_epoch_has_every_sample_once() -> None:
    steps = epochs(5, 2, seed=7)
    seen = [index for _ in range(5) for index in next(steps)]
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))
    assert seen[:5] != seen[5:]
    assert next(epochs(5, 2, seed=7)) == seen[:2]
    assert [index for _, step in zip(range(5), epochs(5, 2, seed=8), strict=False) for index in step] != seen


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(run: Run, tmp_path: Path) -> None:
    command = ("train", "toy:build", "--data", "toy:build_samples", "--microbatches", 2, "--batch-size", 4, "--json")
    whole = run(*command, "--steps", 3)
    half = run(*command, "--steps", 1, "--save", tmp_path / "half")
    rest = run(*command, "--steps", 3, "--resume", tmp_path / "half")
    assert whole.code == half.code == rest.code == 0, rest.err
    assert rest.json["loss"] == pytest.approx(whole.json["loss"], rel=1e-5)
    late = run(*command, "--steps", 1, "--resume", tmp_path / "half")
    assert late.code == 1 and "is at step 1 already" in late.err


def test_train_captures_before_step_1_what_batches_of_free_sizes_need_and_a_second_start_nothing(
    run: Run, here: None, tmp_path: Path
) -> None:
    command = ("train", "toy:build", "--data", "toy:build_free_samples", "--microbatches", 2, "--batch-size", 4)
    first, second, without = (
        run(*command, "--steps", 6, "--json", *rest)
        for rest in (("--cache", tmp_path), ("--cache", tmp_path), ("--no-cache",))
    )
    assert first.code == 0, first.err
    assert first.err.count("capturing") == without.err.count("capturing") == 1
    assert "capturing 2 of about 2: input_ids has size 15 in dim 1, in the captured batch 7" in first.err
    assert "capturing" not in second.err and "ignored" not in second.err
    assert first.json["loss"] == second.json["loss"] == without.json["loss"]
