"""`--config FILE` and `--dump-config`: files give what options give, and what is unknown or without effect is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.processes.cli_run import Run

from mmcompile.cli.config_file import read_config
from mmcompile.config import PlanRequest

OPTIONS = ("--cluster", "1x4xH100", "--stages", "language_model=2", "--microbatches", 2, "--replicas", 1)


def test_what_is_dumped_is_read_again(run: Run, tiny: Path, tmp_path: Path) -> None:
    dumped = run("plan", tiny, *OPTIONS, "--train", "projector", "--text-tokens", 64, "--dump-config")
    assert dumped.code == 0, dumped.err
    found = yaml.safe_load(dumped.out)
    assert found.keys() == {"plan", "example", "model"}
    assert found["plan"]["stages"] == {"language_model": 2} and found["plan"]["num_microbatches"] == 2
    assert found["model"] == {"train": ["projector"], "dtype": None, "random_weights": False}
    file = tmp_path / "options.yaml"
    file.write_text(dumped.out)
    assert run("plan", tiny, "--config", file, "--dump-config").out == dumped.out
    changed = yaml.safe_load(run("plan", tiny, "--config", file, "--microbatches", 8, "--dump-config").out)
    assert changed["plan"]["num_microbatches"] == 8 and changed["plan"]["stages"] == {"language_model": 2}


def test_a_plan_by_a_file_is_the_plan_by_options(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('[plan]\ncluster = "1x4xH100"\nnum_microbatches = 2\nstages = {language_model = 2}\nreplicas = 1\n')
    by_file, by_options = tmp_path / "a.json", tmp_path / "b.json"
    assert run("plan", tiny, "--config", file, "-o", by_file).code == 0
    assert run("plan", tiny, *OPTIONS, "-o", by_options).code == 0
    assert by_file.read_text() == by_options.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan: {microbatch: 2}", r"unknown key plan\.microbatch; the nearest are num_microbatches"),
        ("plans: {}", r"unknown section plans; the nearest are plan"),
        ("plan: {num_microbatches: few}", r"plan\.num_microbatches is 'few': Expected `int"),
        ("plan: {schedule: random}", r"plan\.schedule is 'random': Invalid enum value"),
        ("plan: {tensor_parallel: {a: x}}", r"plan\.tensor_parallel is"),
        ("plan: {attention: model, context_parallel: 2}", r"context_parallel 2 needs attention 'bitfield'"),
        ("plan: {stats: x}", r"--stats has no effect without --global-batch"),
        ("model: {random_weights: true}", r"model\.random_weights has no effect on this command"),
        ("plan: 3", r"section plan is 3; wanted keys with values"),
        ("[", r"cannot read options from .*options\.yaml"),
    ],
)
def test_files_with_mistakes_are_refused(text: str, message: str, run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    done = run("plan", tiny, "--config", file)
    assert done.code == 1 and re.search(message, done.err), done.err


def test_a_missing_file_and_one_of_another_kind(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert "cannot read options from" in run("plan", tiny, "--config", tmp_path / "absent.yaml").err
    (tmp_path / "options.ini").write_text("")
    assert "must end in .yaml, .yml or .toml" in run("plan", tiny, "--config", tmp_path / "options.ini").err


def test_values_have_the_types_of_fields(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("run: {lr: 1e-4}\nplan: {fsdp: [language_model], autocast: true, tensor_parallel: 2}\n")
    found = read_config(file, "plan", ("fsdp", "autocast", "tensor_parallel"))
    assert PlanRequest(**found) == PlanRequest(fsdp=["language_model"], autocast=True, tensor_parallel=2)
    assert read_config(file, "run", ("lr",)) == {"lr": 1e-4}
