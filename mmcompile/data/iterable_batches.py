"""`IterableBatches`: batches of a dataset without indices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

from mmcompile.data.collate import Sample
from mmcompile.data.cursor import StreamCursor, decode, encode
from mmcompile.data.data_checks import asked, check_batch_size, check_sample, check_size, check_stream, named
from mmcompile.errors import DataError

Stream: TypeAlias = Iterable[Sample] | Callable[[], Iterator[Sample]]
"""Source of samples that yields the same samples in the same order each time it is iterated (or called) for an epoch."""


@runtime_checkable
class ResumableDataset(Protocol):
    """An iterable with a state, from which it resumes when it is iterated next.

    `state_dict` is the position of the next sample; on an unread dataset, of the first one.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next sample as a dict."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Set the position to that of `state_dict`."""


@runtime_checkable
class _EpochDataset(Protocol):
    """A dataset whose sample order depends on an epoch number."""

    def set_epoch(self, epoch: int, /) -> object:
        """Set the epoch number that the sample order depends on."""


class IterableBatches:
    """Batches of a dataset that is read in its own order.

    Where the dataset has `state_dict` and `load_state_dict`, cursors hold its state, and resuming costs no reading.
    Otherwise the first `read` after `seek` reads the samples already taken in the epoch, and drops them. The same is done for
    Hugging Face datasets with a shuffle buffer: their state lacks the samples in the buffer, which would be lost.

    `set_epoch`, if the dataset has it, is called for each epoch; the order of a shuffling dataset must follow from the epoch
    alone.

    Raises:
        DataError: the dataset can be read only once, or has no samples.
    """

    def __init__(self, dataset: Stream, batch_size: int) -> None:
        check_batch_size(batch_size)
        check_stream(dataset)
        self._dataset, self._batch_size = dataset, batch_size
        self._resumable: ResumableDataset | None = None
        if isinstance(dataset, ResumableDataset) and not _has_shuffle_buffer(dataset):
            self._resumable = dataset
        self._first = self._state()
        """State of the unread dataset, from which an epoch restarts.

        A dataset that loaded a state may otherwise restart there.
        """
        self._start = StreamCursor(batch_size=batch_size, epoch=0, taken=0)
        self._at = self._start
        """Position after the last batch read."""
        self._iterator: Iterator[Sample] | None = None
        """Iterator at position `_at`; None if the dataset is at another position."""

    def read(self) -> list[Sample]:
        """Return the samples of the next step."""
        epoch, taken = self._at.epoch, self._at.taken
        # A generator that failed is over: after an error, the next read opens the dataset where this one began.
        iterator, self._iterator = self._open() if self._iterator is None else self._iterator, None
        samples: list[Sample] = []
        while len(samples) < self._batch_size:
            sample = self._next(iterator, epoch, taken)
            if sample is None:
                check_size(self._dataset, taken, self._batch_size, epoch)
                epoch, taken = epoch + 1, 0
                iterator = self._iterate(epoch)
            else:
                samples.append(sample)
                taken += 1
        self._at = StreamCursor(batch_size=self._batch_size, epoch=epoch, taken=taken, state=self._state())
        self._iterator = iterator
        return samples

    def cursor(self) -> str:
        """Return the position after the samples read so far, as JSON text that `seek` resumes from."""
        return encode(self._at)

    def seek(self, cursor: str | None) -> None:
        """Resume from a cursor; None restarts at the first sample."""
        found = self._start if cursor is None else decode(cursor, StreamCursor, "iterable")
        if found.batch_size != self._batch_size:
            raise DataError(
                f"the data cannot go on from the cursor {cursor}: steps had {found.batch_size} samples, here they have "
                f"{self._batch_size}; give the batch size of the run that wrote it, or start from the beginning"
            )
        if found.state is not None and self._resumable is None:
            raise DataError(
                f"the data cannot go on from the cursor {cursor}: it holds a dataset's own state, which {named(self._dataset)} "
                "cannot load exactly; give the dataset of the run that wrote it, or start from the beginning"
            )
        self._at, self._iterator = found, None

    def _open(self) -> Iterator[Sample]:
        """Return an iterator over the samples from position `_at` of the dataset to the end of the epoch."""
        at = self._at
        state = self._first if at.state is None else at.state
        if self._resumable is not None and state is not None:
            load = self._resumable.load_state_dict
            asked(f"load_state_dict({state}) of {named(self._dataset)}", lambda: load(json.loads(state)))
        iterator = self._iterate(at.epoch)
        for skipped in range(at.taken if at.state is None else 0):
            if self._next(iterator, at.epoch, skipped) is None:
                raise DataError(
                    f"{named(self._dataset)} ends after {skipped} samples of epoch {at.epoch}, and by the cursor {at.taken} were "
                    "taken; give the dataset of the run that wrote the cursor"
                )
        return iterator

    def _iterate(self, epoch: int) -> Iterator[Sample]:
        where = f"epoch {epoch} of {named(self._dataset)}"
        asked(where, lambda: _set_epoch(self._dataset, epoch))
        dataset = self._dataset
        if isinstance(dataset, Iterable):
            return asked(where, lambda: iter(dataset))
        return asked(where, lambda: iter(dataset()))

    def _next(self, iterator: Iterator[Sample], epoch: int, taken: int) -> Sample | None:
        where = f"sample {taken} in epoch {epoch} of {named(self._dataset)}"
        try:
            return check_sample(asked(where, lambda: next(iterator)), where)
        except StopIteration:
            return None

    def _state(self) -> str | None:
        """Return the state of the dataset (`state_dict`) as JSON text; None if it has no state."""
        if self._resumable is None:
            return None
        state = asked(f"state_dict() of {named(self._dataset)}", self._resumable.state_dict)
        try:
            text = json.dumps(state)
            plain = json.loads(text) == state
        except (TypeError, ValueError):
            text, plain = "", False
        if not plain:
            raise DataError(
                f"state_dict() of {named(self._dataset)} is {state!r}; wanted numbers, text, flags, None, lists, and dicts with "
                "text keys, since it is kept as JSON: turn tuples, tensors and bytes into lists there, and back when loading"
            )
        return text


def _set_epoch(dataset: object, epoch: int) -> None:
    if isinstance(dataset, _EpochDataset):
        dataset.set_epoch(epoch)


def _has_shuffle_buffer(dataset: object) -> bool:
    """Return True if a Hugging Face dataset, or a dataset inside it, draws samples from a shuffle buffer."""
    if "datasets" not in sys.modules:
        return False
    found, seen = [dataset], {id(dataset)}
    while found:
        one = found.pop()
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return True
        if isinstance(one, list | tuple):
            parts = list(one)
        else:
            parts = list(vars(one).values()) if type(one).__module__.startswith("datasets.") else []
        found += [part for part in parts if id(part) not in seen]
        seen |= set(map(id, parts))
    return False
