"""A second start makes no capture; stored captures compute what new ones do, and files that do not hold are ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.graphs.split import eager_from_logits, even_plan, run_split
from support.oracles.eager import difference, eager_outcome, graph_outcome
from torch import Tensor, nn
from zoo import ALL
from zoo.free_sizes import free_batch

from mmcompile.captured_model import CapturedModel, captured_step
from mmcompile.codegen.program_cache import Patterns
from mmcompile.ir.capture import Capture
from mmcompile.ir.inputs import completed
from mmcompile.ir.stored.capture_bytes import StoreError, decoded, encoded
from mmcompile.ir.stored.capture_store import CaptureStore
from mmcompile.ir.stored.model_digest import model_digest

NAMES = ("two_encoder_net", "qwen2_5_vl")


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_is_the_same_after_a_round_trip(name: str) -> None:
    model, batch = ALL[name].build(torch.float64), ALL[name].batch(torch.float64)
    found = captured_step(model, batch)
    data = encoded(found, model)
    again: Capture = decoded(data, model)
    assert len(data) < sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert again.graph.module.code == found.graph.module.code
    for ours, theirs in zip(again.graph.module.graph.nodes, found.graph.module.graph.nodes, strict=True):
        assert ours.meta.keys() <= theirs.meta.keys()
        for key in ours.meta.keys() - {"val"}:
            assert ours.meta[key] == theirs.meta[key]
    for field in dataclasses.fields(found.graph):
        if field.compare:
            assert getattr(again.graph, field.name) == getattr(found.graph, field.name)
    assert again.sizes == found.sizes and again.reads == found.reads
    flat = completed(model, batch)
    gap = difference(graph_outcome(model, again, flat), graph_outcome(model, found, flat))
    assert gap.identical, str(gap)


def test_a_second_start_captures_nothing(tmp_path: Path) -> None:
    """Not of batches without pictures either, which read only a part of the parameters."""
    name = "qwen2_5_vl"
    batches = [free_batch(name, 50 + index, media, torch.float64) for index, media in enumerate((2, 3, 2, 4, 3, 0, 0))]
    told: list[list[str]] = []
    for _ in range(2):
        model = ALL[name].build(torch.float64)
        subject = CapturedModel.of(model, batches[0], cache=tmp_path)
        first = subject.capture()
        reasons: list[str] = []
        told.append(reasons)
        plan = even_plan(first.graph, {"language_model": 2})
        patterns = Patterns(
            model,
            plan,
            first,
            batches[0],
            lambda _, reason, reasons=reasons: reasons.append(reason),
            store=subject.store,
        )
        patterns.warm_up(batches[1:4])
        for batch in batches:
            prepared = patterns.prepare(batch)
            run = run_split(model, prepared.programs, {**prepared.values, **prepared.sizes})
            assert (gap := difference(run.outcome, eager_from_logits(model, batch)[0])).within(1e-9), str(gap)
    assert [len(reasons) for reasons in told] == [2, 0]


class Repeated(nn.Module):
    """A layer that runs as often as an input tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: Tensor) -> dict[str, Tensor]:
        for _ in range(int(times)):
            x = torch.tanh(self.layer(x))
        return {"loss": x.square().mean()}


def test_what_another_process_learned_meanwhile_is_not_captured_again(tmp_path: Path) -> None:
    model = Repeated()
    batches = [
        {"x": torch.randn(rows, 4), "times": torch.tensor(times)} for rows, times in ((5, 1), (7, 1), (6, 2), (8, 3))
    ]
    subject = CapturedModel.of(model, batches[0], cache=tmp_path)
    first = subject.capture()
    told: tuple[list[str], list[str]] = [], []
    ours, theirs = (
        Patterns(
            model,
            even_plan(first.graph, {}),
            first,
            batches[0],
            lambda _, reason, reasons=reasons: reasons.append(reason),
            store=subject.store,
        )
        for reasons in told
    )
    for batch in batches:  # the store is asked again after it gave what was learned from the third batch
        patterns = ours.prepare(batch).programs.pattern, theirs.prepare(batch).programs.pattern
        assert patterns[0] == patterns[1]
    assert len(told[0]) == 3 and not told[1], told


class Small(nn.Module):
    """A layer whose width of steps an attribute tells."""

    scale: Tensor

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x)) * self.scale
        return {"loss": x.square().mean()}


def _capture(model: nn.Module, folder: Path, batch: Mapping[str, Tensor], made: list[int]) -> Capture:
    flat = completed(model, batch)

    def make() -> Capture:
        made.append(1)
        return captured_step(model, flat)

    return CaptureStore(folder, model).captured(flat, make)


def test_another_model_batch_or_flag_is_another_file(tmp_path: Path) -> None:
    made: list[int] = []
    batch = {"x": torch.ones(3, 4)}
    frozen, scaled = Small(), Small()
    frozen.layer.bias.requires_grad_(False)
    scaled.scale.mul_(2)
    models = [Small(), Small(times=3), frozen, scaled, Small().double(), Small().eval()]
    for model in models:
        dtype = model.layer.weight.dtype
        _capture(model, tmp_path, {"x": batch["x"].to(dtype)}, made)
    _capture(models[0], tmp_path, {"x": torch.ones(5, 4)}, made)
    assert len({model_digest(model) for model in models}) == len(models)
    assert len(made) == len(list(tmp_path.iterdir())) == len(models) + 1
    for model in (Small(), Small(times=3)):  # other weights
        _capture(model, tmp_path, batch, made)
    assert len(made) == len(models) + 1


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "writable"])
def test_a_file_that_does_not_hold_is_ignored_in_one_line(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[int] = []
    model, batch = Small(), {"x": torch.ones(3, 4)}
    _capture(model, tmp_path, batch, made)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    whole = file.read_bytes()
    match damage:
        case "cut":
            file.write_bytes(whole[:-10])
        case "changed":
            file.write_bytes(bytes(content))
        case "foreign":
            file.write_bytes(b"not a capture")
        case _:
            file.chmod(0o666)
    found = _capture(model, tmp_path, batch, made)
    assert len(made) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stored capture {file} is ignored: "), line
    outcome = graph_outcome(model, found, completed(model, batch))
    assert difference(outcome, eager_outcome(model, batch)).within(1e-6)
    _capture(model, tmp_path, batch, made)
    assert len(made) == 2, "the file was not written anew"


def test_bytes_with_functions_of_other_packages_are_refused() -> None:
    import os

    model = Small()
    with pytest.raises(StoreError, match=r"posix\.system has no place in a capture"):
        decoded(encoded(os.system, model), model)
