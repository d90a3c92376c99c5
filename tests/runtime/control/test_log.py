"""The write-ahead log: what a crash, a bad disk or a second coordinator can do to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.log import (
    Activated,
    Committed,
    Ended,
    History,
    Log,
    Member,
    Prepared,
    Record,
    RolledBack,
)

MEMBER = Member(node="a", incarnation="x", num_workers=2)
RECORDS: tuple[Record, ...] = (
    Prepared(generation=1),
    Prepared(generation=2),
    Activated(generation=2, members=(MEMBER,), payload='{"b": 8}'),
    Committed(generation=2, step=1, microbatches=(0, 1), cursor="{}"),
    Committed(generation=2, step=2, microbatches=(2, 3), cursor=None),
    RolledBack(step=1, cursor="{}"),
    Prepared(generation=3),
    Activated(generation=3, members=(), payload="ü"),
    Committed(generation=3, step=2, microbatches=(), cursor=None),
    Ended(reason="done", success=True),
)


def write(path: Path) -> list[History]:
    """All records; the history after each number of them."""
    log, histories = Log.open(path), [History()]
    for record in RECORDS:
        log.append(record)
        histories.append(log.history)
    log.close()
    return histories


def read(path: Path) -> History:
    log = Log.open(path)
    log.close()
    return log.history


def test_reads_what_was_written(tmp_path: Path) -> None:
    histories = write(tmp_path / "log")
    history = read(tmp_path / "log")
    assert history == histories[-1]
    assert (history.generation, history.committed, history.ended) == (3, 2, RECORDS[-1])


def test_cut_off_anywhere_it_reads_all_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    histories = write(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert read(path) == histories[data[:length].count(b"\n")]
    log = Log.open(path)
    log.append(RECORDS[-1])
    log.close()
    assert path.read_bytes() == data


def test_a_last_line_of_nonsense_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    histories = write(path)
    for rest in (b"\n", b"00000000 {}\n", b"\0" * 512, b"zzzzzzzz {}\n", b"short\n"):
        whole = path.read_bytes()
        path.write_bytes(whole + rest)
        assert read(path) == histories[-1]
        assert path.read_bytes() == whole


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"damaged at byte \d+ of \d+, and not in its last line: restore it"):
        Log.open(path)
    assert path.read_bytes() == data


def test_two_coordinators_cannot_share_a_log(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "log")
    with pytest.raises(ConfigError, match="in use by another coordinator"):
        Log.open(tmp_path / "log")
    log.close()
    Log.open(tmp_path / "log").close()


def test_a_long_log_is_cut_to_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    histories = write(path)
    log = Log.open(path, compact_bytes=100)
    assert log.history == histories[-1]
    assert path.read_bytes().count(b"\n") == 1
    with pytest.raises(ConfigError, match="in use"):
        Log.open(path)
    log.append(Prepared(generation=9))
    log.close()
    assert read(path).generation == 9


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the coordinator's log"):
        Log.open(tmp_path / "file" / "log")


@pytest.mark.parametrize(
    "record",
    [
        Prepared(generation=2),
        Activated(generation=1, members=(), payload=""),
        Committed(generation=2, step=2, microbatches=(), cursor=None),
        Committed(generation=2, step=4, microbatches=(), cursor=None),
    ],
)
def test_history_refuses_what_must_never_happen(record: Record) -> None:
    with pytest.raises(AssertionError):
        History(generation=2, committed=2).after(record)
