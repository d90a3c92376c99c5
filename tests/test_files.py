"""Files are whole or not there."""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmcompile.errors import MMCompileError, OutputError
from mmcompile.files import write_atomic


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 1 KiB: the kernel fails the write, as on a full disk.

    Not a fixture: pytest writes its own report between a test and the end of its fixtures.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_writes_text_and_bytes_and_makes_folders(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file"
    assert write_atomic(target, "grün") == target
    assert target.read_bytes() == "grün".encode()
    write_atomic(target, b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomic(tmp_path / "ours", "")
    assert stat.S_IMODE(os.stat(tmp_path / "ours").st_mode) == stat.S_IMODE(os.stat(tmp_path / "plain").st_mode)


def test_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomic(target, "old")
    message = r"cannot write .*file \(5000 bytes\): .*; nothing was changed there"
    with pytest.raises(OutputError, match=message), small_files():
        write_atomic(target, b"x" * 5000)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(MMCompileError, match="cannot write"):
        write_atomic(tmp_path / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    with pytest.raises(OutputError, match="cannot write .*folder/file"):
        write_atomic(tmp_path / "folder" / "file", "text")
