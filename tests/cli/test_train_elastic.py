"""`mmcompile train` by a plan with templates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes.cli_run import Run
from transformers import LlavaForConditionalGeneration

from mmcompile.runtime.control.events import EventReader

MODEL, DATA = "examples.digits_llava:build_model", "examples.digits_llava:build_samples"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_nodes_train_and_the_model_is_saved(run: Run, tmp_path: Path) -> None:
    out, saved = tmp_path / "run", tmp_path / "saved"
    done = run(
        *("train", MODEL, "--data", DATA, "--fault-tolerance", 1, "--nodes", 4, "--reduction", "fixed"),
        *("--steps", 6, "--batch-size", 16, "--save-every", 2, "--out", out, "--export", saved, "--json"),
    )
    assert done.code == 0, done.err
    assert done.json["steps"] == 6 and done.json["samples"] == 96
    assert {path.name for path in out.iterdir()} >= {"plan.json", "stages", "run"}
    assert [event.step for event in EventReader(out / "run" / "events.jsonl").read() if event.cursor] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    LlavaForConditionalGeneration.from_pretrained(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "4"), "--fault-tolerance and --nodes go together"),
        (("--fault-tolerance", "1"), "--fault-tolerance and --nodes go together"),
        (("--fault-tolerance", "1", "--nodes", "3"), "use 4 nodes, or a fault tolerance of 0"),
        (("--fault-tolerance", "1", "--nodes", "4", "--correct"), "--correct does not go together with templates"),
        (("--fault-tolerance", "1", "--nodes", "4", "--node", "a"), "--coordinator, --secret is missing"),
        (("--save-every", "3"), "--save-every has no effect without templates"),
        (("--coordinator", "10.0.0.1:1"), "--coordinator has no effect without templates"),
    ],
)
def test_options_that_have_no_effect_are_refused(run: Run, options: Sequence[str], message: str) -> None:
    done = run("train", MODEL, "--data", DATA, "--batch-size", 16, "--steps", 2, *options)
    assert done.code == 1
    assert message in " ".join(done.err.split())
