"""The lines of an event log as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mmcompile.errors import EngineError
from mmcompile.runtime.control.effects import EventKind
from mmcompile.runtime.control.events import Event

_POLL_S = 0.02


class EventReader:
    """Reads a file of JSON lines while another process appends to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Whole lines since the last time; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        lines, end, _ = data.rpartition(b"\n")
        self._offset += len(lines) + len(end)
        return [msgspec.json.decode(line, type=Event) for line in lines.split(b"\n") if line]


def follow(reader: EventReader, gone: Callable[[], bool]) -> Iterator[Event]:
    """Events up to the one that ends the run.

    Args:
        gone: whether the coordinator has ended for good.

    Raises:
        EngineError: it ended without a word.
    """
    while True:
        ended = gone()
        for event in reader.read():
            yield event
            if event.kind is EventKind.ENDED:
                return
        if ended:
            raise EngineError("the coordinator ended without a word; its errors are above")
        time.sleep(_POLL_S)
