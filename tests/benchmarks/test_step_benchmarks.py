"""The benchmarks of whole steps run on tiny settings, and what they build on is what it says."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from support.paths import BENCHMARKS


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from the name of a benchmark to its module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def check(rows: Any) -> None:
    rows = list(rows)
    assert rows
    assert all(math.isfinite(row.mean) and row.low <= row.mean * (1 + 1e-9) for row in rows)
    assert all(row.mean <= row.high * (1 + 1e-9) for row in rows)


def test_entrain(load: Any) -> None:
    entrain = load("step_entrain")
    rows = list(entrain.figures(entrain.Case(entrain.SETTINGS[0], 0, global_batch=64), 1, 0))
    check(rows)
    check(entrain.best_of(rows))


def test_work_of_layers_adds_up(load: Any) -> None:
    models = load("entrain_models")
    rows = np.array([256.0, 4096.0, 9216.0])
    for language in (models.LLAMA_1B, models.LLAMA_3B):
        assert math.isclose(language.by_layer(rows).sum(), language.flops(rows).sum())
        whole = models.VISION.by_layer(rows, language.width).sum()
        assert math.isclose(whole, models.VISION.flops(rows, language.width).sum())


def test_a_dip_like_schedule_computes_everything_once(load: Any) -> None:
    entrain = load("step_entrain")
    schedule = entrain.dip_schedule(3)
    for rank, actions in enumerate(schedule.ranks):
        done = [(action.stage, str(action.kind), action.microbatch) for action in actions if action.kind.is_compute]
        wanted = [(stage, kind, m) for stage in (rank, rank + 8) for kind in "FB" for m in range(3)]
        assert sorted(done) == sorted(wanted)


def test_orchmllm(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orchmllm = load("step_orchmllm")
    monkeypatch.setattr(orchmllm, "SMALL", 16)
    model = orchmllm.Mllm(**{**_fields(orchmllm.MODELS[0]), "batches": {16: (10, 5)}})
    pool = orchmllm.Pool.of("orchmllm-mix", 0, count=500)
    check(orchmllm.throughputs(model, pool, 16, 1, 0))
    check(orchmllm.volumes(model, pool, 16, 1, 0))


def test_no_rearrangement_is_below_the_bound(load: Any) -> None:
    orchmllm = load("step_orchmllm")
    volume = np.random.default_rng(0).integers(0, 9, (16, 16))
    assert orchmllm.least_sent(volume, 4) <= orchmllm.rearrange(volume, 4).sent


def test_dflop(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dflop = load("step_dflop")
    monkeypatch.setattr(dflop, "GLOBAL_BATCH", 168)
    samples = dflop.Samples(0)
    theta = dflop.own_degrees(samples)
    assert theta.devices == dflop.DEVICES == dflop.SHARED.devices
    check(dflop.figures(samples, 1, 0))


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}
