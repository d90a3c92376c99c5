"""One family's stream of microbatches: captures, replays, equality with eager, and throughput beside eager.

Run by `stream.py`, in a process of its own for each family; prints one `Row` as JSON.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for `zoo` and `support`, which the tests share with this file

import msgspec  # noqa: E402  (after the path)
import torch  # noqa: E402
import typer  # noqa: E402
from support.graphs.split import even_plan, run_split  # noqa: E402
from support.oracles.eager import difference, eager_outcome  # noqa: E402
from torch import nn  # noqa: E402
from zoo import ALL  # noqa: E402
from zoo.family import Batch  # noqa: E402
from zoo.streams import stream  # noqa: E402

import mmcompile as mm  # noqa: E402
from mmcompile.captured_model import captured_step  # noqa: E402
from mmcompile.codegen.program_cache import Patterns  # noqa: E402
from mmcompile.errors import MMCompileError  # noqa: E402
from mmcompile.runtime.engine import Engine  # noqa: E402

FIRST = 20
"""Microbatches in which captures are allowed."""
IN_A_STEP = 4
"""Microbatches of a step when throughput is measured."""
WARM_UP = 8
"""Microbatches that are given to `warm_up`, as `mmcompile train` gives its first."""
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


class Row(msgspec.Struct, kw_only=True):
    """One family's line of the table."""

    family: str
    microbatches: int = 0
    captures: tuple[int, ...] = ()
    """Microbatch that needed each capture; 0 for the plan's and those of the warm-up."""
    reasons: tuple[str, ...] = ()
    """Reason for each later capture, with the line of Python that decided, and warnings."""
    capture_s: float = 0.0
    """Processor seconds of all captures."""
    replay_ms: float = 0.0
    """Median processor time to prepare a microbatch after the first `FIRST`."""
    loss: float = 0.0
    """Largest relative difference of a loss from eager's."""
    gradient: float = 0.0
    """Largest relative difference of a gradient from eager's."""
    worst: str = ""
    """Microbatch and parameter with the largest difference, or why two outcomes cannot be compared."""
    throughput: float | None = None
    """Steps a second of the engine over those of eager; None if not measured."""
    step_ms: tuple[float, float] = (0.0, 0.0)
    """Median step of the engine and of eager."""
    failure: str = ""
    """Error that ended the measurement; empty if none did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to measure of a family."""

    family: str
    microbatches: int
    dtype: torch.dtype
    rounds: int
    """Alternating rounds of throughput; 0 to leave it out."""

    def batches(self) -> list[Batch]:
        """Return the microbatches of the family's stream."""
        return list(stream(self.family, self.microbatches, dtype=self.dtype))

    def model(self) -> nn.Module:
        """Return the family's model."""
        return ALL[self.family].build(self.dtype)


def measured(task: Task) -> Row:
    """Measure a family; the row contains the error if one ended the measurement."""
    row = Row(family=task.family)
    try:
        _follow(task, row)
        if task.rounds:
            _race(task, row)
    except Exception as error:  # noqa: BLE001  (a row contains what happened; the others are still to be measured)
        where = "" if isinstance(error, MMCompileError) else f"{type(error).__name__}: "
        row.failure = f"at microbatch {row.microbatches}: {where}{error}"
    return row


def _follow(task: Task, row: Row) -> None:
    """Prepare every microbatch, run its stages one after another, and compare them with eager."""
    model, batches = task.model(), task.batches()
    started = time.process_time()
    first = captured_step(model, batches[0])
    patterns = Patterns(model, even_plan(first.graph, {}), first, batches[0])
    patterns.warm_up(batches[:WARM_UP])
    row.captures, row.capture_s = (0,) * patterns.num_captures, time.process_time() - started
    row.reasons = tuple(patterns.reasons)
    replays: list[float] = []
    for index, batch in enumerate(batches):
        before, started = patterns.num_captures, time.process_time()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            prepared = patterns.prepare(batch)
        seconds = time.process_time() - started
        if (made := patterns.num_captures - before) or warned:
            row.captures += (index,) * made
            row.reasons += tuple(f"{index}: {reason}" for reason in patterns.reasons[before - 1 :])
            row.reasons += tuple(f"{index}: {warning.message}" for warning in warned)
            row.capture_s += seconds
        else:
            replays.append(seconds)
        row.replay_ms = 1e3 * statistics.median(replays[-task.microbatches + FIRST :] or [0.0])
        outcome = run_split(model, prepared.programs, {**prepared.values, **prepared.sizes}).outcome
        found = difference(outcome, eager_outcome(model, batch))
        row.microbatches = index + 1
        if found.missing:
            raise RuntimeError(str(found))
        if found.gradient > row.gradient:
            row.worst = f"{found.worst} of microbatch {index}"
        row.loss, row.gradient = max(row.loss, found.loss), max(row.gradient, found.gradient)


def _race(task: Task, row: Row) -> None:
    """Time steps of the engine in two processes and of eager in one with two threads, in alternating rounds."""
    batches = task.batches()
    steps = [batches[start : start + IN_A_STEP] for start in range(0, len(batches) - IN_A_STEP + 1, IN_A_STEP)]
    if len(steps) <= task.rounds + WARM_UP // IN_A_STEP:
        raise RuntimeError(f"{len(steps)} steps are too few for {task.rounds} rounds on new microbatches")
    model, alone = task.model(), task.model()
    plan = mm.plan(model, batches[0], num_microbatches=IN_A_STEP)
    if len({rank for stage in plan.stages for rank in stage.ranks}) != 2:
        raise RuntimeError("the plan is not for two processes")
    with mm.parallelize(model, batches[0], plan, optimizer=ADAMW) as engine:
        eager = _eager_step(alone)
        engine.warm_up(steps[: WARM_UP // IN_A_STEP])
        for step in steps[: -task.rounds]:
            engine.step(step)
        for step in steps[:2]:
            eager(step)
        times = [_round(engine, eager, step) for step in steps[-task.rounds :]]  # none of them was replayed before
    row.step_ms = tuple(1e3 * statistics.median(kind) for kind in zip(*times, strict=True))  # type: ignore[assignment]
    row.throughput = sum(theirs for _, theirs in times) / sum(ours for ours, _ in times)


def _round(engine: Engine, eager: Callable[[Sequence[Batch]], None], step: Sequence[Batch]) -> tuple[float, float]:
    """Return the seconds of one step on the same microbatches, of the engine and of eager."""
    times: list[float] = []
    for run, threads in ((engine.step, 1), (eager, 2)):
        torch.set_num_threads(threads)
        started = time.perf_counter()
        run(step)  # type: ignore[operator]
        times.append(time.perf_counter() - started)
    torch.set_num_threads(1)
    return times[0], times[1]


def _eager_step(model: nn.Module) -> Callable[[Sequence[Batch]], None]:
    """Return a step of AdamW on accumulated gradients; each token counts the same, as in the engine."""
    optimizer = ADAMW(model.parameters())

    def run(batches: Sequence[Batch]) -> None:
        counts = [int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches]
        for batch, count in zip(batches, counts, strict=True):
            (model(**batch)["loss"] * (count / sum(counts))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def main(
    family: str,
    microbatches: Annotated[int, typer.Option(min=2)] = 200,
    dtype: str = "float32",
    rounds: Annotated[int, typer.Option(min=0)] = 12,
) -> None:
    """Print the row of one family as JSON."""
    torch.set_num_threads(1)
    chosen: Any = getattr(torch, dtype)
    if chosen is torch.float64:
        torch.Tensor.float = torch.Tensor.double  # models cast to float32 in places
    row = measured(Task(family=family, microbatches=microbatches, dtype=chosen, rounds=rounds))
    print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    typer.run(main)
