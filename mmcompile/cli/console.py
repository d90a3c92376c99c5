"""Output of commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from mmcompile.planner.plan.plan import Plan


@functools.cache
def errors() -> Console:
    """Return the console of standard error. Rich is imported when something is shown on it."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """Print the message of a user's mistake on standard error."""
    from rich.markup import escape

    errors().print(f"[bold red]error[/bold red] {escape(message)}", soft_wrap=True)


def print_traceback() -> None:
    """Print the exception that is handled, with its frames."""
    errors().print_exception()


def print_text(text: str) -> None:
    """Print a result for people: never wrapped, so that tables survive a narrow terminal or a pipe."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_result(json: bool, value: Any, text: str, output: object | None = None) -> None:
    """Print `value` as JSON if `json` is set, else `text` and the path `output` of the file that the result was written to."""
    if json:
        print_json(value)
    else:
        print_text(text if output is None else f"{text.rstrip()}\n\nwritten to {output}")


def print_plan(plan: Plan) -> None:
    """Print the table of a plan; on a terminal with its labels in colour."""
    if not sys.stdout.isatty():
        print_text(str(plan))
        return
    from rich.console import Console
    from rich.text import Text

    text = Text(str(plan))
    text.highlight_regex(
        r"(?m)^(predicted|bottlenecks|resilience|templates|cuts|rejected|notes|links|shared)(?= )", "bold cyan"
    )
    text.highlight_regex(r"(?m)^stage .*$|\A.*$", "bold")
    text.highlight_regex(r"(?m)(?<= )(slowest|fullest|idle)(?=: )", "yellow")
    Console(highlight=False, soft_wrap=True).print(text)


def print_json(value: Any) -> None:
    """Print a result for programs, as one JSON object."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


@contextlib.contextmanager
def busy(what: str) -> Generator[None]:
    """Show a spinner with the text `what` on a terminal, while the block runs."""
    with errors().status(what):
        yield


@contextlib.contextmanager
def counting(what: str) -> Generator[Callable[[int], None]]:
    """Show a spinner with the text `what` and a number on a terminal; yield the function that sets the number."""
    with errors().status(what) as status:
        yield lambda count: status.update(f"{what}: {count}")


def silence_libraries() -> None:
    """Keep other people's progress bars and advice out of our output."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
