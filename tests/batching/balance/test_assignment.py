"""Assignments: conservation, loads, deferral, order, exchanged rows, text and JSON both ways, and every error."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.oracles.balance_oracle import assignment_in, random_costs

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import ABSENT, Assignment, Grid, SampleCosts, exchanged
from mmcompile.batching.balance.hierarchical import Hierarchical
from mmcompile.batching.balance.post_balance import PostBalance
from mmcompile.errors import ConfigError, VerifyError

COMPONENTS = ("vision", "language_model")
COSTS = SampleCosts(
    components=COMPONENTS,
    costs=np.array([[1.0, 2.0, 0.0, 4.0], [10.0, 20.0, 30.0, 40.0]]),
)


def example(**changes: object) -> Assignment:
    """Four samples, the third without an image, the last deferred from the first to the second microbatch."""
    places = {
        "replica": np.array([[0, 1, ABSENT, 0], [0, 0, 0, 0]]),
        "microbatch": np.array([[0, 0, ABSENT, 0], [0, 0, 1, 1]]),
        "grid": Grid(num_replicas=(2, 1), num_microbatches=2),
    }
    return Assignment(components=COMPONENTS, **(places | changes))  # type: ignore[arg-type]


TEXT = """\
assignment samples=4 microbatches=2
vision replicas=2
  0.0: 0 3
  1.0: 1
language_model replicas=1
  0.0: 0-1
  0.1: 2-3"""


def test_text_of_the_example() -> None:
    assert str(example()) == TEXT


def test_loads_are_sums_of_costs() -> None:
    loads = example().loads(COSTS)
    assert loads["vision"].tolist() == [[5.0, 0.0], [2.0, 0.0]]
    assert loads["language_model"].tolist() == [[30.0, 70.0]]


def test_deferred_samples_are_computed_later_by_the_language_model() -> None:
    found = example()
    assert found.deferred(0).tolist() == [False, False, False, True]
    assert not found.deferred(1).any()


@pytest.mark.parametrize("seed", range(30))
def test_json_reads_back_equal(seed: int) -> None:
    costs = random_costs(seed)
    grid = Grid(
        num_replicas=tuple(1 + (seed + row) % 3 for row in range(len(costs.components))), num_microbatches=1 + seed % 5
    )
    found = Hierarchical().assign(costs, grid)
    found.check(costs)
    back = assignment_in(json.loads(json.dumps(found.to_json())))
    assert back == found and hash(back) == hash(found) and back.to_bytes() == found.to_bytes()


def test_another_place_or_grid_is_another_assignment() -> None:
    moved = np.array([[1, 1, ABSENT, 0], [0, 0, 0, 0]])
    assert example(replica=moved) != example()
    assert example(grid=Grid(num_replicas=(2, 1), num_microbatches=3)) != example()
    assert example() != "assignment"


def test_arrays_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        example().replica[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        COSTS.costs[0, 0] = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"replica": [[ABSENT, 1, ABSENT, 0], [0, 0, 0, 0]], "microbatch": [[ABSENT, 0, ABSENT, 0], [0, 0, 1, 1]]},
            "sample 0 takes part in vision and is in none of its microbatches",
        ),
        (
            {"replica": [[0, 1, 1, 0], [0, 0, 0, 0]], "microbatch": [[0, 0, 0, 0], [0, 0, 1, 1]]},
            "sample 2 takes no part in vision and is in replica 1, microbatch 0 of it",
        ),
        (
            {"replica": [[0, 2, ABSENT, 0], [0, 0, 0, 0]]},
            "sample 1 is in replica 2, microbatch 0 of vision, which has 2 replicas of 2",
        ),
        ({"microbatch": [[0, 0, ABSENT, 0], [0, 0, 1, 2]]}, "sample 3 is in replica 0, microbatch 2 of language_model"),
        ({"microbatch": [[0, 0, ABSENT, ABSENT], [0, 0, 1, 1]]}, "sample 3 is in replica 0, microbatch -1 of vision"),
        (
            {"microbatch": [[0, 1, ABSENT, 0], [0, 0, 1, 1]]},
            "sample 1 is in microbatch 0 of language_model and in the later 1 of vision",
        ),
    ],
)
def test_check_names_the_sample_and_component(changes: dict[str, list[list[int]]], message: str) -> None:
    example().check(COSTS)
    with pytest.raises(VerifyError, match=message):
        example(**{name: np.array(value) for name, value in changes.items()}).check(COSTS)


def test_check_refuses_another_step() -> None:
    other = SampleCosts(components=COMPONENTS, costs=np.ones((2, 5)))
    with pytest.raises(VerifyError, match="an assignment of 4 samples"):
        example().check(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"replica": np.zeros((2, 3))},
        {"replica": np.zeros((1, 4)), "microbatch": np.zeros((1, 4))},
        {"grid": Grid(num_replicas=(1,))},
    ],
)
def test_shapes_must_agree(changes: dict[str, object]) -> None:
    with pytest.raises(VerifyError, match="wanted"):
        example(**changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"costs": np.ones((3, 4))}, "wanted .2 components, samples"),
        ({"costs": np.ones(4)}, "wanted .2 components, samples"),
        ({"costs": np.array([[1.0, np.nan], [1, 1]])}, "not finite"),
        ({"costs": np.array([[1.0, -1], [1, 1]])}, "negative"),
        ({"lengths": np.ones((2, 3))}, "lengths have shape"),
        ({"lengths": -np.ones((2, 4))}, "none negative"),
    ],
)
def test_costs_are_checked(fields: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleCosts(components=COMPONENTS, **({"costs": np.ones((2, 4))} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "grid", [{"num_replicas": ()}, {"num_replicas": (0,)}, {"num_replicas": (1,), "num_microbatches": 0}]
)
def test_a_grid_has_places(grid: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="wanted at least 1"):
        Grid(**grid)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_rows_go_from_where_a_sample_is_computed_to_where_it_is_computed_next(seed: int) -> None:
    costs = random_costs(seed, num_samples=50, num_components=3)
    grid = Grid(num_replicas=(1 + seed % 4, 3, 2), num_microbatches=1 + seed % 2)
    found, rows = PostBalance().assign(costs, grid), np.arange(50) + 1
    for encoder in (0, 1):
        volume = exchanged(found, encoder, found, 2, rows)
        wanted = np.zeros((grid.num_replicas[encoder], 2), dtype=np.int64)
        for sample in np.flatnonzero(costs.takes_part[[encoder, 2]].all(axis=0)):
            wanted[found.replica[encoder, sample], found.replica[2, sample]] += rows[sample]
        assert volume.dtype == np.int64 and np.array_equal(volume, wanted)
        assert np.array_equal(exchanged(found, 2, found, encoder, rows), volume.T)


def test_rows_leave_where_samples_arrived() -> None:
    costs = random_costs(7, num_samples=30, num_components=2)
    grid = Grid(num_replicas=(3, 2))
    arrival, found = Arrival().assign(costs, grid), PostBalance().assign(costs, grid)
    rows = np.arange(30) + 1
    volume = exchanged(arrival, -1, found, 0, rows)
    assert volume.shape == (2, 3) and volume.sum() == rows[costs.takes_part.all(axis=0)].sum()
    stays = exchanged(arrival, -1, arrival, -1, rows)
    assert np.array_equal(stays, np.diag(np.diag(stays)))
