"""Processor seconds that the command takes where it looks at no model: help, a plan file, the list of passes.

Each command runs in a process of its own, `ROUNDS` times; the least of user and system time counts, which is what it takes on a
machine that does nothing else. Exits with 1 where a command takes more than `LIMIT_S`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 3
LIMIT_S = 1.0
SCRIPT = str(Path(sys.executable).parent / "mmcompile")
CONFIG = str(Path(__file__).parent.parent / "examples" / "configs" / "llava-tiny.json")


def processor_s(arguments: list[str]) -> float:
    """Return the seconds of user and system time of one run."""
    before = os.times()
    subprocess.run([SCRIPT, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the seconds of each command; exit with 1 where one is over the limit."""
    slow = False
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.json")
        subprocess.run([SCRIPT, "plan", CONFIG, "-o", plan], check=True, stdout=subprocess.DEVNULL)
        for arguments in (["--help"], ["--version"], ["show", plan], ["show", plan, "--json"], ["passes"]):
            seconds = min(processor_s(arguments) for _ in range(ROUNDS))
            slow |= seconds > LIMIT_S
            print(f"mmcompile {' '.join(Path(one).name for one in arguments):<24}{seconds:6.2f} s")
    if slow:
        sys.exit(f"a command takes more than {LIMIT_S} s of processor time")


if __name__ == "__main__":
    main()
