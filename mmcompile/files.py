"""Atomic file writes: a file is whole or not there. Everything mmcompile writes goes through here."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from mmcompile.errors import OutputError


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write a file atomically, text as UTF-8, and return its path; its folder is made if missing.

    The bytes go to a temporary file in the same folder, reach the disk, and take the name in one rename.

    Raises:
        OutputError: it cannot be written (disk full, no permission, a folder in its place); nothing changed under its
            name.
    """
    target = Path(path)
    content = data.encode() if isinstance(data, str) else data
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, content)
    except OSError as error:
        raise OutputError(
            f"cannot write {target} ({len(content)} bytes): {error.strerror}; nothing was changed there; "
            "free some space or name another place"
        ) from error
    return target


def sync(path: Path) -> None:
    """Block until a file or folder is on the disk (fsync)."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write(target: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    # The umask can only be read by setting it.
    current = os.umask(0o022)
    os.umask(current)
    return current
