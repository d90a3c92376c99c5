"""Samples of every step, from any step on: each once an epoch, whoever reads."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mmcompile.data.batches import Batches, IterableBatches, MapBatches
from mmcompile.data.collate import Sample
from mmcompile.errors import DataError


def sample(index: int) -> Sample:
    return {"input_ids": torch.tensor([[index]])}


def ids(samples: list[Sample]) -> list[int]:
    return [int(one["input_ids"]) for one in samples]  # pyright: ignore[reportArgumentType]


class Indexed(Dataset[Sample]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.broken: int | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index == self.broken:
            raise OSError("no such image")
        return sample(index)


class Plain(IterableDataset[Sample]):
    """Its own order, the same in each epoch. It has a length, as some have."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.broken: int | None = None
        self.given = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self.length):
            if index == self.broken:
                raise OSError("no such shard")
            self.given += 1
            yield sample(index)


class Shuffled(IterableDataset[Sample]):
    """An order for each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epochs.append(epoch)

    def order(self) -> list[int]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        return order

    def __iter__(self) -> Iterator[Sample]:
        yield from map(sample, self.order())


class Resumable(Shuffled):
    """It goes on from the state it loaded last, once, as those of `torchdata` do."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.place = 0
        self.loaded: int | None = None
        self.given = 0

    def __iter__(self) -> Iterator[Sample]:
        self.place, self.loaded = self.loaded or 0, None
        for index in self.order()[self.place :]:
            self.place += 1
            self.given += 1
            yield sample(index)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "shards": [self.length]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["shards"] == [self.length]
        self.loaded = state_dict["place"]


class Sticky(Resumable):
    """It starts where it last loaded a state, if the epoch is that one's, as those of `datasets` do."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.from_state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Sample]:
        state = self.from_state
        self.loaded = state["place"] if state is not None and state["epoch"] == self.epoch else None
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.from_state = state_dict


def generated(length: int) -> Callable[[], Iterator[Sample]]:
    return lambda: map(sample, range(length))


KINDS: dict[str, Callable[[int], Any]] = {
    "map": Indexed,
    "list": lambda length: [sample(index) for index in range(length)],
    "plain": Plain,
    "function": generated,
    "shuffled": Shuffled,
    "resumable": Resumable,
    "sticky": Sticky,
}


def check_epochs(stream: list[int], length: int) -> None:
    """Every sample once in each full epoch, none twice in the last."""
    for start in range(0, len(stream), length):
        counts = Counter(stream[start : start + length])
        assert set(counts) <= set(range(length)) and set(counts.values()) == {1}


def batches_of(data: Any, batch_size: int, seed: int) -> MapBatches | IterableBatches:
    """Of a dataset with a length and indices, or of one that is read in its own order."""
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if indexed and not isinstance(data, IterableDataset | Mapping):
        return MapBatches(data, batch_size, seed)
    return IterableBatches(data, batch_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "batch_size"), [(12, 4), (13, 4), (7, 5), (5, 5), (3, 1)])
def test_epochs(kind: str, length: int, batch_size: int) -> None:
    """Also across the end of epochs, and wherever another reader with the same data goes on."""
    batches = batches_of(KINDS[kind](length), batch_size, seed=3)
    steps, cursors = [], [batches.cursor()]
    for _ in range(4 * length // batch_size + 2):
        steps.append(ids(batches.read()))
        cursors.append(batches.cursor())
    assert all(len(step) == batch_size for step in steps)
    check_epochs(list(itertools.chain(*steps)), length)
    if isinstance(batches, MapBatches):
        assert [list(batches.indices(step)) for step in range(1, len(steps) + 1)] == steps

    rng = random.Random(length)
    readers = [batches, batches_of(KINDS[kind](length), batch_size, seed=3)]
    for _ in range(40):
        reader = rng.choice(readers)
        start = rng.randrange(len(steps))
        reader.seek(None if start == 0 and rng.random() < 0.5 else cursors[start])
        for step in range(start, min(start + rng.randrange(4), len(steps))):
            assert reader.cursor() == cursors[step] or start == step == 0
            assert ids(reader.read()) == steps[step]
            assert reader.cursor() == cursors[step + 1]


def test_cursors_are_json() -> None:
    batches = IterableBatches(Resumable(9), 2)
    batches.read()
    assert json.loads(batches.cursor())["taken"] == 2


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return MapBatches(Indexed(50), 50, seed).indices(epoch + 1)

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    assert MapBatches(Indexed(6), 4, seed=0, shuffle=False).indices(2) == (4, 5, 0, 1)


def test_order_is_the_same_in_other_processes() -> None:
    code = "from mmcompile.data.batches import MapBatches\nprint(list(MapBatches(range(40), 7, seed=11).indices(9)))"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert json.loads(out) == list(MapBatches(Indexed(40), 7, seed=11).indices(9))


def test_seek_reads_what_it_skips_only_without_state() -> None:
    for dataset, read in ((Resumable(30), 3), (Plain(30), 27)):
        batches = IterableBatches(dataset, 3)
        for _ in range(8):
            batches.read()
        cursor, dataset.given = batches.cursor(), 0
        batches.seek(cursor)
        assert dataset.given == 0
        batches.read()
        assert dataset.given == read


def test_every_epoch_is_set() -> None:
    dataset = Shuffled(4)
    batches = IterableBatches(dataset, 3)
    steps = [ids(batches.read()) for _ in range(4)]
    assert dataset.epochs == [0, 1, 2]
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders += dataset.order()
    assert list(itertools.chain(*steps)) == orders


@pytest.mark.parametrize("kind", ["map", "plain"])
def test_after_an_error_the_same_step_is_next(kind: str) -> None:
    dataset = KINDS[kind](10)
    batches: Batches = MapBatches(dataset, 4, 0, shuffle=False) if kind == "map" else IterableBatches(dataset, 4)
    batches.read()
    cursor = batches.cursor()
    dataset.broken = 6
    for _ in range(2):
        with pytest.raises(DataError, match=r"sample 6 .*failed: OSError: no such"):
            batches.read()
        assert batches.cursor() == cursor
    dataset.broken = None
    assert ids(batches.read()) == [4, 5, 6, 7]


class Unready(Plain):
    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("iterate first")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Opaque(Unready):
    def state_dict(self) -> dict[str, Any]:
        return {"generator": (1, 2)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: batches_of(Indexed(3), 4, 0), "Indexed has 3 samples in epoch 0, a step needs 4; give a larger"),
        (lambda: batches_of([], 1, 0), "list has 0 samples in epoch 0, a step needs 1"),
        (lambda: batches_of(Indexed(3), 0, 0), "0 samples; wanted at least 1"),
        (lambda: MapBatches(Indexed(3), 1, 0).indices(0), "steps count from 1"),
        (lambda: batches_of(Plain(3), 4, 0).read(), "Plain has 3 samples in epoch 0, a step needs 4"),
        (lambda: batches_of(Plain(0), 1, 0).read(), "Plain has 0 samples in epoch 0"),
        (lambda: batches_of(map(sample, range(9)), 1, 0), "map can be read only once.* a function that returns a new"),
        (lambda: batches_of({"train": Indexed(3)}, 1, 0), "mapping with 'train'; wanted one of its datasets"),
        (lambda: batches_of(DataLoader(Indexed(3)), 1, 0), "pass the dataset it reads"),
        (lambda: batches_of(3, 1, 0), "int holds no samples"),
        (lambda: batches_of([[1]], 1, 0).read(), "sample 0 of the list is a list; wanted a mapping"),
        (lambda: batches_of(Unready(3), 1, 0), r"state_dict\(\) of the Unready failed: AttributeError: iterate first"),
        (lambda: batches_of(Opaque(3), 1, 0), "turn tuples, tensors and bytes into lists"),
    ],
)  # fmt: skip
def test_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        make()


def test_a_function_that_returns_one_iterator_twice() -> None:
    only = map(sample, range(6))
    batches = IterableBatches(lambda: only, 3)
    assert [ids(batches.read()) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(
        DataError, match="0 samples in epoch 1, a step needs 3; wanted .* a function that returns a new"
    ):
        batches.read()


def cursor_of(batches: Batches) -> str:
    batches.read()
    return batches.cursor()


@pytest.mark.parametrize(
    ("batches", "cursor", "words"),
    [
        (MapBatches(Indexed(8), 2, 0), cursor_of(MapBatches(Indexed(9), 2, 0)), '"length":9.*here it would be .*"length":8'),
        (MapBatches(Indexed(8), 2, 0), cursor_of(MapBatches(Indexed(8), 2, 1)), '"seed":0'),
        (MapBatches(Indexed(8), 2, 0), cursor_of(MapBatches(Indexed(8), 4, 0)), '"batch_size":2'),
        (MapBatches(Indexed(8), 2, 0), cursor_of(MapBatches(Indexed(8), 2, 0, False)), '"shuffle":true'),
        (MapBatches(Indexed(8), 2, 0), cursor_of(IterableBatches(Plain(8), 2)), "kind 'iterable', this one is of kind 'map'"),
        (IterableBatches(Plain(8), 2), cursor_of(MapBatches(Indexed(8), 2, 0)), "kind 'map', this one is of kind 'iterable'"),
        (IterableBatches(Plain(8), 2), cursor_of(IterableBatches(Plain(8), 3)), "steps had 3 samples, here they have 2"),
        (IterableBatches(Plain(8), 2), cursor_of(IterableBatches(Resumable(8), 2)), "own state, which the Plain cannot load"),
        (IterableBatches(Plain(8), 2), "17", "is not a cursor"),
        (IterableBatches(Plain(8), 2), '{"kind": "iterable", "version": 1, "epoch": 1}', "is not a cursor"),
        (MapBatches(Indexed(8), 2, 0), '{"kind": "map", "version": 9}', "version 9; this mmcompile reads version 1"),
    ],
)  # fmt: skip
def test_foreign_cursors(batches: Batches, cursor: str, words: str) -> None:
    batches.read()
    after = batches.cursor()
    with pytest.raises(DataError, match=words):
        batches.seek(cursor)
    assert batches.cursor() == after
    assert ids(batches.read()) == [*batches.indices(2)] if isinstance(batches, MapBatches) else [2, 3]


def test_a_dataset_that_shrank() -> None:
    long, short = IterableBatches(Plain(9), 4), IterableBatches(Plain(6), 4)
    long.read()
    short.seek(cursor_of(long))
    with pytest.raises(DataError, match="ends after 6 samples of epoch 0, and by the cursor 8 were taken"):
        short.read()


def hugging_face(length: int) -> Any:
    datasets = pytest.importorskip("datasets")
    table = pytest.importorskip("pyarrow").table({"input_ids": [[index] for index in range(length)]})
    return datasets.Dataset(table, fingerprint="rows")


class TestHuggingFace:
    """Datasets of the `datasets` library, where it is installed."""

    @pytest.mark.parametrize("buffer", [0, 4])
    @pytest.mark.parametrize("shards", [1, 3])
    def test_stream(self, buffer: int, shards: int) -> None:
        rows = hugging_face(13)

        def make() -> IterableBatches:
            stream = rows.to_iterable_dataset(num_shards=shards).map(lambda row: {"labels": row["input_ids"]})
            made = batches_of(stream.shuffle(seed=5, buffer_size=buffer) if buffer else stream, 3, 0)
            assert isinstance(made, IterableBatches)
            return made

        batches = make()
        steps, cursors = [], [batches.cursor()]
        for _ in range(14):
            steps.append([row["input_ids"][0] for row in batches.read()])  # pyright: ignore[reportArgumentType, reportIndexIssue, reportOptionalSubscript]
            cursors.append(batches.cursor())
        check_epochs(list(itertools.chain(*steps)), 13)
        assert ("examples_iterable" in cursors[-1]) == (not buffer)
        readers = [batches, make()]
        for start in [3, 9, 2, 13, 0, 4, 5, 8, 12, 0]:
            for reader in readers:
                reader.seek(cursors[start])
                found = [row["input_ids"][0] for row in reader.read()]  # pyright: ignore[reportArgumentType, reportIndexIssue, reportOptionalSubscript]
                assert found == steps[start]

    def test_indices(self) -> None:
        batches = batches_of(hugging_face(13), 3, 0)
        assert isinstance(batches, MapBatches)
        assert [row["input_ids"][0] for row in batches.read()] == list(batches.indices(1))  # pyright: ignore[reportArgumentType, reportIndexIssue, reportOptionalSubscript]
