"""`check_lockstep`: replicas that share parameters must gather them together, or they would wait for each other for ever.

A replica of an encoder without samples in a microbatch computes those of another one, and its result is dropped (`StepPlanner`).
The language model has no such way out: its loss would count twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmcompile.batching.step_plan import MicrobatchPlan
from mmcompile.codegen.program import PreparedMicrobatch
from mmcompile.errors import BatchError
from mmcompile.planner.plan.placement import PlacedStage

_INSTEAD = (
    "give every microbatch of every replica samples that use the same parts of it, which balance='arrival' does where their "
    "order does; or plan without fsdp, and train with shard_optimizer=True"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageWork:
    """Work of one replica of a stage in one microbatch; the stage's other replicas must do the same work."""

    gathered: tuple[str, ...]
    """Names of the parameters that the stage gathers, in order."""
    backward: bool
    learns: bool
    """False for a loss stage whose microbatch has no token to learn from, and which so runs no backward; else True."""


def check_lockstep(
    microbatches: Sequence[MicrobatchPlan], prepared: Sequence[PreparedMicrobatch], stages: Iterable[PlacedStage]
) -> None:
    """Check that all replicas of a stage that share its parameters gather the same ones at the same time.

    Args:
        microbatches: microbatches of a step.
        prepared: programs and values of each microbatch, in the same order.
        stages: all placed stages.

    Raises:
        BatchError: a replica lacks work of another one; the message names replica, microbatch and remedy.
    """
    sharing = {stage.program_name: stage for stage in stages if stage.sharing}  # one replica of each
    for name, stage in sharing.items():
        numbers: dict[tuple[str, int], dict[int, tuple[MicrobatchPlan, _StageWork]]] = {}
        for microbatch, source in zip(microbatches, prepared, strict=True):
            if name in microbatch.flow.stages and microbatch.tower == stage.tower:
                work = _work(name, microbatch, source)
                numbers.setdefault((microbatch.tower, microbatch.number), {})[microbatch.replica] = microbatch, work
        for found in numbers.values():
            _check(name, len(stage.sharing), found)


def _work(stage: str, microbatch: MicrobatchPlan, prepared: PreparedMicrobatch) -> _StageWork:
    program = prepared.programs.programs[stage]
    return _StageWork(
        gathered=program.gathered,
        backward=stage in microbatch.flow.backward,
        learns=not program.is_loss or microbatch.loss_weight != 0,
    )


def _check(stage: str, count: int, found: dict[int, tuple[MicrobatchPlan, _StageWork]]) -> None:
    first = min(found)
    microbatch, wanted = found[first]
    where = (
        f"replicas of {stage} share its parameters (fsdp), so all must do the same in each microbatch: in microbatch"
    )
    has = f"replica {first} has {_samples(microbatch)}"
    for replica in range(count):
        if replica not in found:
            lag = f", which end {microbatch.lag} later" if microbatch.lag else ""
            raise BatchError(f"{where} {microbatch.slot}, {has}{lag}, and replica {replica} has none; {_INSTEAD}")
        other, work = found[replica]
        if work != wanted:
            raise BatchError(
                f"{where} {microbatch.slot}, replica {replica} with {_samples(other)} {_difference(work, wanted)}, and {has}; "
                f"{_INSTEAD}"
            )


def _difference(work: _StageWork, wanted: _StageWork) -> str:
    if work.learns != wanted.learns:
        return "has a token to learn from" if work.learns else "has no token to learn from"
    if work.backward != wanted.backward:
        return "runs a backward" if work.backward else "runs no backward"
    missing = [name for name in wanted.gathered if name not in work.gathered]
    if missing:
        return f"does not use {missing[0]}{f' and {len(missing) - 1} others' if len(missing) > 1 else ''}"
    added = [name for name in work.gathered if name not in wanted.gathered]
    return f"uses {added[0]} too" if added else "uses parameters in another order"


def _samples(microbatch: MicrobatchPlan) -> str:
    names = ", ".join(map(str, microbatch.samples))
    return f"sample{'s' if len(microbatch.samples) > 1 else ''} {names}"
