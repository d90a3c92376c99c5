"""Measured actions of a step, with the actions of consecutive layers merged into actions of the stage that they form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from mmcompile.files import write_atomic
from mmcompile.planner.plan.by_layers import layer_of
from mmcompile.planner.schedule.simulate import Event
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups

FILE = "events.json"
"""Name of the trace file in a run's folder, as `mmcompile.report.run_folder` reads it."""


def collect(groups: Groups, events: Iterable[Event], path: Path) -> None:
    """Gather the events of all ranks on rank 0, and write them to a file there."""
    mine = list(_merged(events))
    if groups.rank:
        wire.send_bytes(groups, 0, wire.encode(mine))
        return
    for rank in range(1, groups.world_size):
        mine += wire.decode(wire.receive_bytes(groups, rank), list[Event])
    write_atomic(path, msgspec.json.encode(mine) + b"\n")


def read_trace(path: Path) -> list[Event]:
    """Return the events that `collect` wrote; an empty list if no step was traced."""
    return msgspec.json.decode(path.read_bytes(), type=list[Event]) if path.exists() else []


def _merged(events: Iterable[Event]) -> Iterator[Event]:
    """Yield one rank's events in order of start; events of consecutive layers with the same action and microbatch become one.

    Stages `language_model.4` .. `language_model.7` of replica 1 become `language_model[4:8]#1`.
    """
    run: list[Event] = []
    for event in sorted(events, key=lambda event: event.start_s):
        if run and not _follows(run[-1], event):
            yield _joined(run)
            run = []
        run.append(event)
    if run:
        yield _joined(run)


def _follows(before: Event, event: Event) -> bool:
    (chain, index, replica), (own, number, other) = _place(before), _place(event)
    same = (before.kind, before.microbatch, chain, replica) == (event.kind, event.microbatch, own, other)
    return same and event.kind.is_compute and abs(index - number) == 1


def _joined(run: list[Event]) -> Event:
    places = [_place(event) for event in run]
    chain, _, replica = places[0]
    indices = [index for _, index, _ in places]
    name = f"{chain}[{min(indices)}:{max(indices) + 1}]{replica}"
    return replace(run[0], stage=name, end_s=run[-1].end_s)


def _place(event: Event) -> tuple[str, int, str]:
    name, mark, replica = event.stage.partition("#")
    layer = layer_of(name)
    return layer.chain, layer.index, mark + replica
