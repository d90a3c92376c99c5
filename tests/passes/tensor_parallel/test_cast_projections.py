"""Projections behind the casts of autocast are projections: they are shared as without autocast, and train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import ALL, samples

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.planner.plan.plan import Plan


def _plan(**options: Any) -> Plan:
    model, batch = ALL["llava"].build(), ALL["llava"].batch()
    return mm.plan(model, batch, cluster="1x8xcpu", tensor_parallel=2, allow_unused=True, **options)


def test_the_same_is_shared_under_autocast_also_in_replicas() -> None:
    def shared(plan: Plan) -> list[str]:
        return [note for note in plan.notes if "ranks share" in note]

    wanted = shared(_plan())
    assert len(wanted) == 3 and wanted[-1] == "2 ranks share 100% of the parameters of language_model"
    assert shared(_plan(autocast=True)) == wanted
    assert shared(_plan(autocast=True, replicas={"language_model": 2})) == wanted


def test_shards_under_autocast_train_as_one_rank_does() -> None:
    given = samples(ALL["llava"], 4, seed=0, media=(1, 1))
    losses: dict[int, list[float]] = {}
    for ranks in (1, 2):
        options: dict[str, Any] = {"tensor_parallel": {"language_model": ranks}, "autocast": ["language_model"]}
        with mm.parallelize(
            ALL["llava"].build(),
            collate(given[:2]),
            num_microbatches=2,
            stages={"language_model": 1},
            allow_unused=True,
            optimizer=torch.optim.SGD,
            **options,
        ) as engine:
            losses[ranks] = [engine.step(given).loss for _ in range(3)]
    assert losses[2] == pytest.approx(losses[1], rel=2e-3)
