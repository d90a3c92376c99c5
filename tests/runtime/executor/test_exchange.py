"""Rows that cross from towers to the language model, in real processes: gradients equal those of one process to 1e-12."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from support.graphs.hand_towers import (
    IGNORED,
    Place,
    TowerSample,
    placed_stages,
    programs_of,
    reference,
    tower_samples,
    tower_step,
)
from support.processes.tower_ranks import TowerJob, TowerShare, run_towers

from mmcompile.config import ScheduleKind

NUM_RANKS = 3
REPLICAS = [(2, 1), (1, 2), (3, 2), (2, 3), (1, 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step: its samples, and who computes them."""

    samples: list[TowerSample]
    places: Mapping[str, Sequence[Place | None]]
    num_replicas: Mapping[str, int]
    num_slots: int
    schedule: ScheduleKind = "1f1b"
    check_rows: bool = True

    def job(self, step: int) -> TowerJob:
        stages = placed_stages(self.num_replicas, NUM_RANKS)
        planned = tower_step(self.samples, self.places, stages, num_slots=self.num_slots, step=step)
        return TowerJob(step=planned, schedule=self.schedule, check_rows=self.check_rows)


def dealt(
    samples: Sequence[TowerSample], encoders: int, language: int, num_slots: int, lag: int, seed: int = 0
) -> Case:
    """A step whose samples are dealt at random, to encoders up to `lag` slots before the language model."""
    deal = random.Random(seed)
    replicas = {"vision": encoders, "audio": max(1, encoders - 1), "language_model": language}
    home = [(deal.randrange(language), deal.randrange(num_slots)) for _ in samples]

    def encoder(tower: str, takes_part: Sequence[bool]) -> list[Place | None]:
        return [
            (deal.randrange(replicas[tower]), max(0, slot - deal.randint(0, lag))) if part else None
            for part, (_, slot) in zip(takes_part, home, strict=True)
        ]

    places = {
        "vision": encoder("vision", [sample.image is not None for sample in samples]),
        "audio": encoder("audio", [sample.sound is not None for sample in samples]),
        "language_model": home,
    }
    return Case(samples=list(samples), places=places, num_replicas=replicas, num_slots=num_slots)


def cases() -> dict[str, Case]:
    uneven = tower_samples([3, None, 1, 5, 0, 2, 1, 7, None, 4, 2], [None, 2, None, 1, 1, None, 3, None, None, 1, 2])
    found: dict[str, Case] = {}
    for encoders, language in REPLICAS:
        for lag in (0, 1, 2):
            found[f"uneven-{encoders}-{language}-lag{lag}"] = dealt(uneven, encoders, language, 3, lag, seed=lag)
        none = tower_samples([None] * 5)
        found[f"no-image-{encoders}-{language}"] = dealt(none, encoders, language, 2, 0)
        one = tower_samples([None, None, 9, None, None])
        found[f"one-sample-{encoders}-{language}"] = dealt(one, encoders, language, 2, 1)
        found[f"no-rows-{encoders}-{language}"] = dealt(tower_samples([0, 0, 0], [1, 0, 0]), encoders, language, 2, 0)
    found["absent-on-a-replica"] = absent_on_a_replica()
    found["in-order-as-it-is"] = same_everywhere()
    found["nothing-to-learn-in-one"] = nothing_to_learn()
    kinds: tuple[ScheduleKind, ...] = ("1f1b", "gpipe", "eager-1f1b")
    for seed in range(12):
        many = tower_samples([seed % 4, 2, None, 1, 3] * 10, [None, 1, 1, 2, None] * 10, seed=seed)
        lag = (0, 1, 4)[seed % 3]
        case = dealt(many, 1 + seed % 3, 1 + seed // 2 % 3, 24, lag, seed)
        found[f"many-{seed}"] = replaced(case, schedule=kinds[seed // 3 % 3], check_rows=bool(seed % 2))
    return found


def replaced(case: Case, *, schedule: ScheduleKind, check_rows: bool) -> Case:
    return Case(
        samples=case.samples,
        places=case.places,
        num_replicas=case.num_replicas,
        num_slots=case.num_slots,
        schedule=schedule,
        check_rows=check_rows,
    )


def absent_on_a_replica() -> Case:
    """Replica 1 of the language model has text only, replica 1 of the vision tower nothing at all."""
    samples = tower_samples([2, None, 1, None])
    places: dict[str, list[Place | None]] = {
        "vision": [(0, 0), None, (0, 1), None],
        "audio": [None] * 4,
        "language_model": [(0, 0), (1, 0), (0, 1), (1, 1)],
    }
    replicas = {"vision": 2, "audio": 1, "language_model": 2}
    return Case(samples=samples, places=places, num_replicas=replicas, num_slots=2)


def same_everywhere() -> Case:
    """Towers compute the same samples as the language model, in the same order: values are passed on as they are."""
    samples = tower_samples([2, 1, 3], [1, 1, 1])
    home: list[Place | None] = [(0, 0), (0, 0), (0, 2)]
    return Case(
        samples=samples,
        places={"vision": home, "audio": home, "language_model": home},
        num_replicas={"vision": 1, "audio": 1, "language_model": 1},
        num_slots=3,
    )


def nothing_to_learn() -> Case:
    """The first microbatch of replica 1 has no valid token; its image still came over."""
    first, *others = tower_samples([2, 1, 3], [None, 1, None])
    blind = TowerSample(
        ids=first.ids, labels=torch.full_like(first.labels, IGNORED), image=first.image, image_at=first.image_at
    )
    places: dict[str, list[Place | None]] = {
        "vision": [(1, 0), (0, 0), (0, 1)],
        "audio": [None, (0, 0), None],
        "language_model": [(1, 0), (0, 0), (0, 1)],
    }
    replicas = {"vision": 2, "audio": 1, "language_model": 2}
    return Case(samples=[blind, *others], places=places, num_replicas=replicas, num_slots=2)


CASES = cases()


@pytest.fixture(scope="module")
def shares() -> dict[str, list[TowerShare]]:
    jobs = [case.job(step) for step, case in enumerate(CASES.values(), 1)]
    found = run_towers(jobs, NUM_RANKS)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_process(name: str, shares: dict[str, list[TowerShare]]) -> None:
    loss, gradients = reference(CASES[name].samples)
    assert sum(share.loss for share in shares[name]) == pytest.approx(loss, abs=1e-12)
    for parameter, wanted in gradients.items():
        parts = [share.gradients[parameter] for share in shares[name] if parameter in share.gradients]
        got = torch.stack(parts).sum(0) if parts else torch.zeros_like(wanted)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_rank_takes_time_for_its_own_microbatches_only(shares: dict[str, list[TowerShare]]) -> None:
    name = "uneven-2-1-lag1"
    step = CASES[name].job(1).step
    for rank, share in enumerate(shares[name]):
        wanted = [
            any((s.tower, s.replica, *s.ranks) == (m.tower, m.replica, rank) for s in step.stages)
            for m in step.plan.microbatches
        ]
        assert (share.seconds > 0).tolist() == wanted


def test_a_tower_that_nobody_needs_leaves_no_gradient(shares: dict[str, list[TowerShare]]) -> None:
    assert not any("vision.weight" in share.gradients for share in shares["no-image-2-1"])
    assert all("text" in programs_of(m.pattern).pattern for m in CASES["no-image-2-1"].job(1).step.plan.microbatches)
