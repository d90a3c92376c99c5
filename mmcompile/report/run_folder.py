"""Folder of a training run: its files, and how to read them.

plan.json         the plan
stages/*.py       the program of each stage
events.json       measured actions of the last traced step
timeline.png, trace.json   the same events as pictures (`mmcompile trace` makes them)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mmcompile.codegen.program import StageProgram
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.schedule.simulate import Event

PLAN, EVENTS, STAGES = "plan.json", "events.json", "stages"


def write_programs(folder: Path, programs: Mapping[str, StageProgram]) -> None:
    """Write `stages/<name>.py`; sources of an earlier plan are removed."""
    for old in (folder / STAGES).glob("*.py"):
        if old.stem not in programs:
            old.unlink()
    for name, program in programs.items():
        write_atomic(folder / STAGES / f"{name}.py", program.source)


def write_events(folder: Path, events: Sequence[Event]) -> Path:
    """Write `events.json`."""
    return write_atomic(folder / EVENTS, msgspec.json.encode(events) + b"\n")


def read_run(folder: Path) -> tuple[Plan, tuple[Event, ...]]:
    """Read the plan of a run and its measured events.

    Raises:
        ConfigError: the folder is not one of a run.
        PlanError: its plan cannot be read.
    """
    path = folder / EVENTS
    try:
        events = msgspec.json.decode(path.read_bytes(), type=tuple[Event, ...])
    except OSError as error:
        raise ConfigError(
            f"{folder} is no run folder: cannot read {path.name}: {error.strerror}; train with --out first"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds no events: {error}; train with --out again") from error
    return Plan.load(folder / PLAN), events
