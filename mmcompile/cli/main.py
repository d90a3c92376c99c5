"""Entry of the command line. Exit code 0: done; 1: a problem was found; 2: bad usage; 130: interrupted.

A user's mistake never shows a traceback, and neither does Ctrl-C at any moment. This module therefore imports almost nothing:
everything else is imported where an interrupt is caught.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_INTERRUPTED = 130
_interrupts: list[int] = []
"""Interrupt signals received. They are noted because an import may turn the KeyboardInterrupt into another exception."""


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, _interrupt)
    _interrupts.clear()
    try:
        code = _run()
    except BaseException as error:
        if not _interrupts:
            raise
        # Whatever the interrupt became on its way.
        code = getattr(error, "code", None) if isinstance(error, SystemExit) else _INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    if _interrupts:
        code = _INTERRUPTED
        sys.stderr.write("interrupted\n")
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _run() -> int:
    from mmcompile.cli import command_group

    return command_group.run()
