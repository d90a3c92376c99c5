"""Training run of one system, replayed in virtual time over a trace of nodes that come and go, with the use of every second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, sqrt
from typing import final

from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.replay.spot_trace import SpotTrace


class TimeKind(StrEnum):
    """Use of a stretch of time in a replayed run."""

    USEFUL = "useful"
    """Steps that counted: they were committed and never lost."""
    REPEATED = "repeated"
    """Steps that were cut off or whose result was lost, so that they are computed again."""
    PAUSED = "paused"
    """Pause to detect a failure, regroup, copy or load state, or restart."""
    SAVING = "saving"
    """Time to write checkpoints."""
    STOPPED = "stopped"
    """Time in which too few nodes are alive to train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConstants:
    """Assumptions of the simulation in s and bytes/s. All systems get new nodes after `creation_s`, and no warning of a loss."""

    creation_s: float = 45.0
    """Seconds from a trace's "add" until the node can work (as in Bamboo's simulator)."""
    reconfigure_s: float = 2.0
    """Seconds of a reconfiguration of templates without copies (with copies 2 to 10 s in Oobleck's simulator)."""
    bytes_per_s: float = 1.25e9
    """Bytes per second that one node sends or receives."""
    restart_s: float = 75.0
    """Seconds to start new processes without loading (76 s with a small model in Oobleck's simulator of Varuna)."""
    store_bytes_per_s: float = 1e9
    """Bytes per second of the checkpoint store (near 0.9e9 in Oobleck's simulator, for 2.7B and 6.7B parameters)."""
    rendezvous_s: float = 30.0
    """Seconds of each regrouping of all nodes under redundant computation (as in Bamboo's simulator)."""
    redundancy_slowdown: float = 1.5
    """Factor on the seconds of a step when every node also computes for its neighbour (as in Bamboo's simulator)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Stretch of time with one use (`TimeKind`), and the number of samples trained in it."""

    start_s: float
    end_s: float
    spent: TimeKind
    samples: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemReplay:
    """Result of replaying one system over a trace: each second is useful, repeated, paused, saving or stopped (`TimeKind`)."""

    name: str
    spans: tuple[Span, ...]
    """Stretches of time from 0 to the end of the trace, without gaps."""
    useful_share: float
    """Share of a useful step's seconds that is not redundant computation, 0..1."""
    lost_samples: float
    """Number of samples that were trained on but lost with the state, and so trained on again."""
    save_interval_s: float
    """Seconds of training between two checkpoints."""
    num_pauses: int
    """Number of times that training had to regroup or restart."""

    def seconds(self, spent: TimeKind) -> float:
        """Return the total seconds of one use. Redundant computation counts to the steps that it is part of."""
        return sum(span.end_s - span.start_s for span in self.spans if span.spent is spent)

    @property
    def duration_s(self) -> float:
        """Seconds of the whole trace."""
        return self.spans[-1].end_s

    @property
    def useful(self) -> float:
        """Share of the time, 0..1, in steps whose result was never lost, without redundant computation."""
        return self.useful_share * self.seconds(TimeKind.USEFUL) / self.duration_s

    @property
    def samples(self) -> float:
        """Number of samples in steps whose result was never lost."""
        return sum(span.samples for span in self.spans if span.spent is TimeKind.USEFUL)

    @property
    def samples_per_s(self) -> float:
        """Samples in steps whose result was never lost, per second of the trace."""
        return self.samples / self.duration_s

    def curve(self, num_windows: int) -> list[tuple[float, float]]:
        """Return points of throughput over time: for `num_windows` equal windows, (middle in s, samples per second)."""
        width = self.duration_s / num_windows
        totals = [0.0] * num_windows
        for span in self.spans:
            if span.spent is not TimeKind.USEFUL or span.end_s <= span.start_s:
                continue
            rate = span.samples / (span.end_s - span.start_s)
            for window in range(int(span.start_s / width), min(num_windows, int(span.end_s / width) + 1)):
                inside = min(span.end_s, (window + 1) * width) - max(span.start_s, window * width)
                totals[window] += rate * max(0.0, inside)
        return [((window + 0.5) * width, total / width) for window, total in enumerate(totals)]


Busy = tuple[tuple[TimeKind, float], ...]
"""Delays before the next step, in order: (use of the time, seconds), for example a pause of 30 s and then saving for 10 s."""


class ReplayRun(ABC):
    """Base of a replayed training run of one system; `play` moves its clock from change to change of the trace.

    A step that is cut off is done again as a whole. New nodes wait for the end of a step, or of a checkpoint.
    """

    name: str
    useful_share: float = 1.0
    """Share of a step's seconds that is not redundant computation, 0..1."""
    joins_after_save: bool = False
    """True if new nodes wait for the next checkpoint; False if they wait for the end of the step."""

    def __init__(self, job: Job, microbatch_samples: float, constants: ReplayConstants, save_interval_s: float) -> None:
        self.job = job
        self.constants = constants
        self.step_s = 0.0
        """Seconds of a step; 0 while training is stopped."""
        self.state_s = int(job.bytes_of.sum()) / constants.store_bytes_per_s
        """Seconds to write or read a checkpoint."""
        self._step_samples = job.num_microbatches * microbatch_samples
        self._save_interval_s = save_interval_s
        self._now_s = 0.0
        self._mark_s = 0.0
        """Virtual time at which the step under way began."""
        self._saved_s = 0.0
        """Time at which the last checkpoint would have ended if training had continued without pauses since."""
        self._spans: list[Span] = []
        self._unsaved: list[int] = []
        self._waiting: list[int] = []
        self._busy: list[tuple[TimeKind, float]] = []
        self._lost_samples = 0.0
        self._num_pauses = 0

    @abstractmethod
    def lose(self, nodes: Sequence[int]) -> Busy | None:
        """Lose nodes, set `step_s` (seconds of a step), return delays (kind, s) before the next; None if no node was in use."""

    @abstractmethod
    def join(self, nodes: Sequence[int]) -> Busy:
        """Use new nodes between steps or while stopped, set `step_s` (seconds of a step), return delays (kind, s) before it."""

    @final
    def play(self, trace: SpotTrace) -> SystemReplay:
        """Replay a whole trace, whose nodes can work as soon as they are added; the initial start takes no time."""
        ends = [*(change.time_s for change in trace.changes[1:]), trace.duration_s]
        for change, end_s in zip(trace.changes, ends, strict=True):
            unused = {node for node in change.removed if node in self._waiting}
            self._waiting = [node for node in self._waiting if node not in unused] + list(change.added)
            self._lose([node for node in change.removed if node not in unused])
            if change.time_s == 0:
                self._join()
                self._busy, self._num_pauses = [], 0
            self._advance(end_s)
        self._spend(TimeKind.USEFUL, trace.duration_s)
        return SystemReplay(
            name=self.name,
            spans=tuple(self._spans),
            useful_share=self.useful_share,
            lost_samples=self._lost_samples,
            save_interval_s=self._save_interval_s,
            num_pauses=self._num_pauses,
        )

    @final
    def roll_back(self) -> None:
        """Count the steps since the last checkpoint as lost."""
        for index in self._unsaved:
            span = self._spans[index]
            self._lost_samples += span.samples
            self._spans[index] = replace(span, spent=TimeKind.REPEATED, samples=0.0)
        self._unsaved = []
        self._saved_s = self._now_s

    @final
    def _lose(self, nodes: Sequence[int]) -> None:
        if not nodes:
            return
        busy = self.lose(nodes)
        if busy is not None:
            if not self._busy:
                self._spend(TimeKind.REPEATED, self._now_s)
            self._start(busy)

    @final
    def _join(self) -> None:
        nodes, self._waiting = self._waiting, []
        busy = self.join(nodes)
        if busy:
            self._start(busy)

    @final
    def _start(self, busy: Busy) -> None:
        self._busy = list(busy)
        self._num_pauses += 1

    @final
    def _advance(self, end_s: float) -> None:
        while self._now_s < end_s:
            between = self._now_s == self._mark_s
            if self._busy:
                self._work(end_s)
            elif self._waiting and (self.step_s == 0 or (between and not self.joins_after_save)):
                self._join()
            elif self.step_s == 0:
                self._spend(TimeKind.STOPPED, end_s)
            else:
                self._train(end_s)

    @final
    def _work(self, end_s: float) -> None:
        """Simulate the first pending task, such as saving a checkpoint, until it is done or until `end_s`."""
        spent, seconds = self._busy[0]
        if self._now_s + seconds > end_s:
            self._busy[0] = (spent, seconds - (end_s - self._now_s))
            self._spend(spent, end_s)
            return
        self._spend(spent, self._now_s + seconds)
        self._busy.pop(0)
        if spent is TimeKind.SAVING:
            self._saved_s, self._unsaved = self._now_s, []
            if self._waiting and self.joins_after_save:
                self._join()

    @final
    def _train(self, end_s: float) -> None:
        """Simulate whole training steps until `end_s` or the next checkpoint, or only one if nodes wait to join after it."""
        steps = int((end_s - self._mark_s) / self.step_s)
        until_save = max(1, ceil((self._saved_s + self._save_interval_s - self._mark_s) / self.step_s))
        limit = 1 if self._waiting and not self.joins_after_save else until_save
        if steps == 0:
            self._now_s = end_s
            return
        steps = min(steps, limit, until_save)
        self._unsaved.append(len(self._spans))
        self._spend(TimeKind.USEFUL, self._mark_s + steps * self.step_s, steps * self._step_samples)
        if steps == until_save:
            self._busy.append((TimeKind.SAVING, self.state_s))

    @final
    def _spend(self, spent: TimeKind, end_s: float, samples: float = 0.0) -> None:
        if end_s > self._mark_s:
            self._spans.append(Span(start_s=self._mark_s, end_s=end_s, spent=spent, samples=samples))
            if spent in (TimeKind.PAUSED, TimeKind.STOPPED):
                self._saved_s += end_s - self._mark_s
        self._now_s = self._mark_s = end_s


def save_interval_s(trace: SpotTrace, save_s: float) -> float:
    """Return the best seconds between checkpoints of `save_s`: `sqrt(2 * save_s * mean time between losses)` (Young, 1974)."""
    losses = sum(bool(change.removed) for change in trace.changes)
    return sqrt(2 * max(save_s, 1.0) * trace.duration_s / max(1, losses))
