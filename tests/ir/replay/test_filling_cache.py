"""Equal integers and shapes need no second replay, unless Python read a float; few bytes are kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mmcompile.ir.capture import capture
from mmcompile.ir.inputs import completed
from mmcompile.ir.replay.filling_cache import FillingCache, digest_of
from mmcompile.ir.replay.learned_capture import capture_learned
from mmcompile.ir.replay.learning import Learner


class Counting(nn.Module):
    """Cuts rows to a length that an input gives; may ask whether a row is empty; counts its forwards."""

    num_forwards = 0

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.asks = asks

    def forward(self, x: Tensor, length: Tensor) -> dict[str, Tensor]:
        Counting.num_forwards += 1
        if self.asks and not bool((x != 0).any()):
            return {"loss": self.head(x).sum()}
        return {"loss": self.head(x[: int(length)]).square().mean()}


def _batch(length: int, rows: int = 8, value: float = 1.0) -> dict[str, Tensor]:
    return {"x": torch.full((rows, 4), value), "length": torch.tensor(length)}


@pytest.mark.parametrize("asks", [False, True])
def test_only_new_integers_and_shapes_are_replayed_unless_floats_are_read(asks: bool) -> None:
    model = Counting(asks=asks)
    batches = [completed(model, batch) for batch in (_batch(3), _batch(5, rows=9), _batch(4))]
    learner = Learner(model)
    last = [learner.see(batch) for batch in batches][-1]
    found = capture_learned(learner, learner.learned(last), capture(model, batches[0]).graph.components)
    steps = [(6, 8, False), (6, 8, True), (7, 8, False), (6, 9, False), (7, 8, True)]
    for length, rows, known in steps:
        before = Counting.num_forwards
        filled = found.filled(completed(model, _batch(length, rows, value=float(length + rows))))
        assert (Counting.num_forwards == before) == (known and not asks)
        given = [value for name, value in filled.items() if name.startswith("given_")]
        assert [value.shape[0] - 2 for value in given] == [length]


def test_the_values_used_longest_ago_are_dropped_first() -> None:
    cache = FillingCache(max_bytes=100)
    values = {"given_0": torch.zeros(5, dtype=torch.int64)}
    for digest in (b"a", b"b"):
        cache.put(digest, values)
    assert cache.get(b"a") is values
    cache.put(b"c", values)
    assert cache.get(b"b") is None and cache.get(b"a") is values and cache.get(b"c") is values
    cache.clear()
    assert cache.get(b"a") is None


def test_digests_differ_where_an_integer_a_shape_or_a_plain_value_differs() -> None:
    batches = [
        {"x": torch.zeros(2, 3), "length": torch.tensor(1)},
        {"x": torch.zeros(3, 2), "length": torch.tensor(1)},
        {"x": torch.zeros(2, 3), "length": torch.tensor(2)},
        {"x": torch.zeros(2, 3), "length": torch.tensor(1, dtype=torch.int32)},
        {"x": torch.zeros(2, 3), "length": torch.tensor(1), "flag": True},
    ]
    model = nn.Identity()
    digests = [digest_of(completed(model, batch)) for batch in batches]
    assert len(set(digests)) == len(batches)
    other = {"x": torch.ones(2, 3), "length": torch.tensor(1)}
    assert digest_of(completed(model, other)) == digests[0]
