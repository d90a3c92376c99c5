"""What commands say and where: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from mmcompile.planner.plan.plan import Plan

ERRORS = Console(stderr=True, highlight=False)


def print_text(text: str) -> None:
    """A result for people: never wrapped, so that tables survive a narrow terminal or a pipe."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_plan(plan: Plan) -> None:
    """The table of a plan; on a terminal with its labels in colour."""
    if not sys.stdout.isatty():
        print_text(str(plan))
        return
    text = Text(str(plan))
    text.highlight_regex(
        r"(?m)^(predicted|bottlenecks|resilience|templates|cuts|rejected|notes|links|shared)(?= )", "bold cyan"
    )
    text.highlight_regex(r"(?m)^stage .*$|\A.*$", "bold")
    text.highlight_regex(r"(?m)(?<= )(slowest|fullest|idle)(?=: )", "yellow")
    Console(highlight=False, soft_wrap=True).print(text)


def print_json(value: Any) -> None:
    """A result for programs: one object."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner on a terminal while something takes seconds."""
    with ERRORS.status(what):
        yield


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int], None]]:
    """A spinner with a number on a terminal; yields what sets it."""
    with ERRORS.status(what) as status:
        yield lambda count: status.update(f"{what}: {count}")


def silence_libraries() -> None:
    """Keep other people's progress bars and advice out of our output."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
