"""`Log`: the coordinator's durable records, each written ahead of every message that depends on it.

A text file, one record a line: eight hexadecimal digits (CRC-32 of the rest), a blank, JSON. A crash can cut off the last
line; that record was never acted upon, and is dropped. Damage anywhere else is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from mmcompile.errors import ConfigError
from mmcompile.files import sync

_COMPACT_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A node with one set of workers (an incarnation); with new workers it is another member."""

    node: str
    incarnation: str
    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Record: a generation number was assigned, and is never assigned again."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Activated:
    """Record: all members of a generation are ready, and it became active."""

    generation: int
    members: tuple[Member, ...]
    payload: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """Record: a step was committed. Only lost state (`RolledBack`) undoes it."""

    generation: int
    step: int
    microbatches: tuple[int, ...]
    cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """Record: state was lost, and training continues from the checkpoint of this step."""

    step: int
    cursor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Record: training has ended."""

    reason: str
    success: bool


Record: TypeAlias = Prepared | Activated | Committed | RolledBack | Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """State of a run that follows from all its records."""

    generation: int = 0
    """Last generation number that was assigned."""
    active: Activated | None = None
    """Last generation that was active, whose members hold the state of step `committed`; None before the first."""
    committed: int = 0
    cursor: str | None = None
    last: Committed | None = None
    """Record of the last committed step; None before the first."""
    ended: Ended | None = None

    def after(self, record: Record) -> History:
        """Return the history with one more record, which must be a valid next one."""
        match record:
            case Prepared():
                assert record.generation > self.generation, f"{record} after generation {self.generation}"
                return replace(self, generation=record.generation)
            case Activated():
                assert record.generation == self.generation, f"{record} while {self.generation} is the last prepared"
                return replace(self, active=record)
            case Committed():
                assert record.step == self.committed + 1, f"{record} after step {self.committed}"
                return replace(self, committed=record.step, cursor=record.cursor, last=record)
            case RolledBack():
                # Nobody holds the state of that step: all load the checkpoint.
                return replace(self, committed=record.step, cursor=record.cursor, active=None, last=None)
            case Ended():
                return replace(self, ended=record)


_KINDS: dict[str, type[Record | History]] = {
    "prepared": Prepared,
    "activated": Activated,
    "committed": Committed,
    "rolled_back": RolledBack,
    "ended": Ended,
    "history": History,
}
"""Class of the contents of a log line, by the only key of the line's JSON object. A compacted log begins with `history`."""
_KEYS = {kind: key for key, kind in _KINDS.items()}


@dataclass(kw_only=True, slots=True)
class Log:
    """Appends records to a log file. `append` returns once the record is on the disk. Only one process can have the log open."""

    history: History
    _file: int

    @classmethod
    def open(cls, path: Path, *, compact_bytes: int = _COMPACT_BYTES) -> Log:
        """Open a log and read its history, or create it.

        Raises:
            ConfigError: another coordinator has it open, it cannot be written, or a line before the last is damaged.
        """
        file = _open_locked(path)
        try:
            data = path.read_bytes()
            history, good = _read(data, path)
            os.ftruncate(file, good)
            if good > compact_bytes:
                _compact(path, history)
                fresh = _open_locked(path)
                os.close(file)
                file = fresh
            return cls(history=history, _file=file)
        except BaseException:
            os.close(file)
            raise

    def append(self, record: Record) -> None:
        """Write a record, and block until it would survive a power failure.

        Raises:
            OSError: the disk is full or missing; no effect that depends on the record may follow.
        """
        self.history = self.history.after(record)
        _write(self._file, _encode(record))

    def close(self) -> None:
        """Close the file, so that another process can open the log."""
        os.close(self._file)


def _encode(line: Record | History) -> bytes:
    body = msgspec.json.encode({_KEYS[type(line)]: line})
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _decode(text: bytes) -> Record | History | None:
    """Return the contents of a log line; None if the line is damaged."""
    head, blank, body = text[:8], text[8:9], text[9:]
    with contextlib.suppress(ValueError, KeyError, msgspec.DecodeError):
        if blank == b" " and int(head, 16) == zlib.crc32(body):
            ((key, raw),) = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()
            return msgspec.json.decode(raw, type=_KINDS[key])
    return None


def _read(data: bytes, path: Path) -> tuple[History, int]:
    """Read a log: return (history of its records, number of bytes before a last line that was cut off by a crash)."""
    history, good = History(), 0
    while good < len(data):
        end = data.find(b"\n", good)
        line = _decode(data[good:end]) if end >= 0 else None
        if line is None:
            if 0 <= end < len(data) - 1:
                raise ConfigError(
                    f"{path} is damaged at byte {good} of {len(data)}, and not in its last line: restore it from a copy, "
                    "or move it away to start from the last checkpoint"
                )
            break
        history = line if isinstance(line, History) else history.after(line)
        good = end + 1
    return history, good


def _compact(path: Path, history: History) -> None:
    """Replace a log by one line with its history. If this process crashes, either the old or the new log is intact."""
    other = path.with_name(path.name + ".new")
    file = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write(file, _encode(history))
    finally:
        os.close(file)
    other.replace(path)
    sync(path.parent)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fdatasync(file)


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the coordinator's log {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise ConfigError(f"{path} is in use by another coordinator: end it first, or choose another log") from error
    # The new name survives a power failure only then.
    sync(path.parent)
    return file
