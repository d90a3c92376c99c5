"""Folders that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from mmcompile.errors import OutputError


def previous(target: Path) -> Path:
    """Where the old folder is between two renames."""
    return target.with_name(f"{target.name}.previous")


@contextlib.contextmanager
def replacing(target: Path, mark: str, ours: Iterable[str]) -> Iterator[Path]:
    """A fresh folder that takes the place of `target` if the block succeeds.

    Args:
        target: not there, empty, or a folder that holds `mark`.
        mark: the file by which a folder is known as one of this kind.
        ours: what the old folder's writer wrote; everything else in it is the user's, and comes along.

    Raises:
        OutputError: the folder cannot be written, or holds something else.
    """
    if target.exists() and not (target / mark).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} exists and holds no {mark}; name another folder, or empty it")
    fresh, old = target.with_name(f"{target.name}.tmp-{os.getpid()}"), previous(target)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            _copy_others(target, fresh, frozenset(ours))
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write to {target}: {error}; what was there is untouched") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _copy_others(old: Path, fresh: Path, ours: frozenset[str]) -> None:
    """What the user put beside our files (a processor, a README)."""
    for path in old.iterdir():
        if path.name in ours or (fresh / path.name).exists():
            continue
        if path.is_dir():
            shutil.copytree(path, fresh / path.name)
        else:
            shutil.copy2(path, fresh / path.name)
