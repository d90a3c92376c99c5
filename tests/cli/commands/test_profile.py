"""`mmcompile profile`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.cli_run import Run

from mmcompile.cli.commands.profile import make_batches
from mmcompile.costmodel.calibration import Calibration
from mmcompile.ir.meta_model import skeleton

QUICK = ("--dtype", "float32", "--sizes", "32,96", "--rounds", 1, "--no-runtime")


def test_a_calibration_is_printed_and_written(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    printed = run("profile", tiny, *QUICK, "--train", "projector", "-o", file)
    assert printed.code == 0, printed.err
    made = Calibration.load(file)
    assert str(made) in printed.out and printed.out.endswith(f"written to {file}\n")
    assert made.runtime is None and made.dtype == "float32" and made.device == "cpu"
    assert [costs.kind.rpartition("-")[0] for costs in made.kinds] == [
        "encoder.embeddings", "encoder.layers", "encoder.outputs", "projector.linear_1",
        "language_model.embed_tokens", "language_model.layers", "language_model.norm",
    ]  # fmt: skip


def test_json_is_one_object(run: Run, tiny: Path) -> None:
    shown = run("profile", tiny, "--dtype", "float32", "--sizes", 32, "--rounds", 1, "--no-runtime", "--json")
    assert shown.code == 0, shown.err
    assert shown.json["kinds"][0]["measurements"][0]["times"]["forward_s"] > 0


def test_a_model_with_its_own_batch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])  # where toy.py stands
    outcome = run("profile", "toy:build_with_batch", "--rounds", 1, "--no-runtime", "--json")
    assert outcome.code == 0, outcome.err
    assert {len(kind["measurements"]) for kind in outcome.json["kinds"]} == {3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--sizes", "64,x"), "--sizes '64,x' is no list of numbers of tokens, for example 64,256,1024"),
        (("--sizes", "0"), "--sizes '0' is no list of numbers"),
        (("--cluster", "8xH100"), "a H100 is measured on one, and this machine has no CUDA device"),
    ],
)
def test_mistakes_are_named(run: Run, tiny: Path, arguments: tuple[str, ...], expected: str) -> None:
    outcome = run("profile", tiny, *arguments)
    assert outcome.code == 1
    assert expected in outcome.err and "Traceback" not in outcome.err


def test_sizes_need_a_batch_that_can_be_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])  # where toy.py stands
    outcome = run("profile", "toy:build_with_batch", "--sizes", "64")
    assert outcome.code == 1
    assert "--sizes has no effect: toy:build_with_batch comes with a batch of its own" in outcome.err


def test_batches_have_the_tokens_asked_for_and_different_numbers_of_images(tiny: Path) -> None:
    model = skeleton(tiny, "float32")
    made = make_batches(model, (64, 256), {"images": 1, "image_size": 56, "audios": 1})
    assert [tuple(batch["input_ids"].shape) for batch in made] == [(1, 64), (1, 256), (2, 32), (4, 64)]
    assert [len(batch["pixel_values"]) for batch in made] == [1, 1, 2, 4]
