"""`Reader`: samples by the number of a step, read in order and kept until the step is committed."""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.data.batches import Batches
from mmcompile.data.collate import Sample


class Reader:
    """The data of whoever leads. Used by one thread at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._next: int | None = None
        """Step that the data stands before; None if it stands anywhere."""
        self._kept: dict[int, tuple[Sequence[Sample], str]] = {}

    def start(self, committed: int, cursor: str | None) -> None:
        """Steps after `committed` come next.

        Args:
            cursor: of the data after that step; None for the beginning.
        """
        self._kept = {step: kept for step, kept in self._kept.items() if step > committed}
        if committed + 1 not in self._kept and self._next != committed + 1:
            self._batches.seek(cursor)
            self._next, self._kept = committed + 1, {}

    def read(self, step: int) -> tuple[Sequence[Sample], str]:
        """Samples of a step, and the cursor after it."""
        for old in [kept for kept in self._kept if kept < step - 1]:
            del self._kept[old]
        while step not in self._kept:
            assert self._next is not None and self._next <= step, f"step {step} is asked for at {self._next}"
            self._kept[self._next] = self._batches.read(), self._batches.cursor()
            self._next += 1
        return self._kept[step]
