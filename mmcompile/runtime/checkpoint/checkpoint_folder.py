"""Atomic replacement of a folder: the old folder stays until the new one is on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

from safetensors import SafetensorError

from mmcompile.errors import CheckpointError
from mmcompile.files import sync
from mmcompile.runtime.monitoring.fail_points import fail_point


@contextlib.contextmanager
def replacing(folder: Path) -> Generator[Path]:
    """Yield an empty folder beside `folder`, to be filled and then put in its place by `swap`; without a swap it is removed.

    Raises:
        CheckpointError: writing fails for any reason (a full disk, no permission). The old folder is untouched.
    """
    fresh = Path()
    try:
        fresh = make_fresh(folder)
        yield fresh
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from error
    finally:
        if fresh != Path():
            shutil.rmtree(fresh, ignore_errors=True)


def make_fresh(folder: Path) -> Path:
    """Make and return an empty folder beside `folder`, on the same file system. Raises OSError."""
    target = resolved(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Only one run writes to a folder at a time: others' are left over from processes that were killed.
    for left in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    fresh = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:12]}")
    fresh.mkdir()
    return fresh


def swap(fresh: Path, folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Put the filled folder `fresh` in the place of `folder`, once all its files are on the disk. Raises OSError.

    Between two renames the old folder is at `<folder>.previous`, where `place_of` finds it.

    Args:
        is_ours: predicate on the path of a file within the old folder: true if `fresh` replaces it. All other files (a
            processor, a README) are the user's, and are kept.
    """
    target = resolved(folder)
    previous = _previous_of(target)
    _keep_foreign(target if target.is_dir() else previous, fresh, is_ours)
    for path in (fresh, *fresh.rglob("*")):
        sync(path)
    if target.exists():
        # A left-over from an interruption: `target` is whole, so it is not needed.
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    fail_point("checkpoint-swapping")
    fresh.rename(target)
    sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def place_of(folder: Path, mark: str) -> Path | None:
    """Return the last complete version of a folder, `folder` or `<folder>.previous`; None if there is none.

    Args:
        mark: name of a file that every complete folder has.
    """
    target = resolved(folder)
    return next((place for place in (target, _previous_of(target)) if (place / mark).is_file()), None)


def resolved(folder: Path) -> Path:
    """Return the absolute path of a folder, with `~` and links resolved."""
    return folder.expanduser().resolve()


def _previous_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.previous")


def unwritable(folder: Path, error: Exception | str) -> CheckpointError:
    """Return the error for a folder that cannot be written."""
    return CheckpointError(f"cannot write to {folder}: {error}; what was saved there before, if anything, is untouched")


def _keep_foreign(old: Path, new: Path, is_ours: Callable[[str], bool]) -> None:
    if not old.is_dir():
        return
    for path in old.rglob("*"):
        name = path.relative_to(old)
        if path.is_file() and not is_ours(name.as_posix()) and not (new / name).exists():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, new / name)
