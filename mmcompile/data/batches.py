"""`Batches`: the samples of each step, as a function of a cursor, so that any worker can resume at any step.

A cursor is JSON text and complete: a worker that never read resumes from it with the same samples in the same order.
Epochs follow one another without a gap: the last batch of an epoch is filled from the next one. So every step has
`batch_size` samples, and each epoch uses every sample exactly once; one step may hold a sample twice, of two epochs.

Nothing is opened and no thread is started before the first `read`: workers are forked from the process that makes these.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Protocol

import torch
from torch import Tensor

from mmcompile.data.collate import Sample
from mmcompile.data.cursor import MapCursor, decode, encode
from mmcompile.data.data_checks import asked, check_batch_size, check_sample, check_size, named
from mmcompile.data.iterable_batches import IterableBatches, Stream
from mmcompile.errors import DataError

__all__ = ["Batches", "IterableBatches", "MapBatches", "MapDataset", "Stream"]


class Batches(Protocol):
    """Source of the samples of each step of a run, resumable from a cursor."""

    def read(self) -> list[Sample]:
        """Return the samples of the next step. After an error, the same step is next again.

        Raises:
            DataError: an epoch has fewer samples than a step, or the dataset failed; the message names the sample.
        """
        ...

    def cursor(self) -> str:
        """Return the position after the samples read so far, as JSON text that `seek` resumes from."""
        ...

    def seek(self, cursor: str | None) -> None:
        """Resume from a cursor; None restarts at the first sample.

        Raises:
            DataError: the cursor was made for other data, or for steps of another size.
        """
        ...


class MapDataset(Protocol):
    """Dataset with samples 0 to `len` - 1; an index always gives the same sample."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Sample: ...


class MapBatches:
    """Batches of a dataset with a length and indices.

    The order of an epoch follows from (seed, epoch) alone, so the samples of any step follow without reading.

    Raises:
        DataError: the dataset has fewer samples than a step.
    """

    def __init__(self, dataset: MapDataset, batch_size: int, seed: int, shuffle: bool = True) -> None:
        check_batch_size(batch_size)
        self._dataset, self._batch_size, self._seed, self._shuffle = dataset, batch_size, seed, shuffle
        self._length = len(dataset)
        check_size(dataset, self._length, batch_size, epoch=0)
        self._step = 0
        # A step reads two epochs at most.
        self._order = functools.lru_cache(maxsize=2)(functools.partial(_order, self._length, seed, shuffle))

    def indices(self, step: int) -> tuple[int, ...]:
        """Return the indices of a step's samples, in order; steps count from 1."""
        if step < 1:
            raise DataError(f"step {step} has no samples; steps count from 1")
        first = (step - 1) * self._batch_size
        places = (divmod(taken, self._length) for taken in range(first, first + self._batch_size))
        return tuple(int(self._order(epoch)[place]) for epoch, place in places)

    def read(self) -> list[Sample]:
        """Return the samples of the next step."""
        samples = [self._sample(index) for index in self.indices(self._step + 1)]
        self._step += 1
        return samples

    def cursor(self) -> str:
        """Return the position after the samples read so far, as JSON text that `seek` resumes from."""
        return encode(self._cursor(self._step))

    def seek(self, cursor: str | None) -> None:
        """Resume from a cursor; None restarts at the first sample."""
        if cursor is None:
            self._step = 0
            return
        found = decode(cursor, MapCursor, "map")
        wanted = self._cursor(found.step)
        if found != wanted:
            raise DataError(
                f"the data cannot go on from the cursor {cursor}: here it would be {encode(wanted)}; give the dataset, batch "
                "size, seed and shuffle of the run that wrote it, or start from the beginning"
            )
        self._step = found.step

    def _cursor(self, step: int) -> MapCursor:
        return MapCursor(
            length=self._length, batch_size=self._batch_size, seed=self._seed, shuffle=self._shuffle, step=step
        )

    def _sample(self, index: int) -> Sample:
        where = f"sample {index} of {named(self._dataset)}"
        return check_sample(asked(where, lambda: self._dataset[index]), where)


def _order(length: int, seed: int, shuffle: bool, epoch: int) -> Tensor:
    """Return the sample indices of an epoch in reading order: int64 [length]."""
    if not shuffle:
        return torch.arange(length)
    # Hashed, so that epoch 1 of a seed is not epoch 0 of the next.
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest(), "little")
    return torch.randperm(length, generator=torch.Generator().manual_seed(key))
