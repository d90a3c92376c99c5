"""`StepPlanner`: from a step's samples to its `StepPlan`, on rank 0, without messages to other ranks."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcompile.batching.accumulation import NOTHING, AccumulatedStep, unit_of
from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import ABSENT, Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.correction import Corrector
from mmcompile.batching.lockstep import check_lockstep
from mmcompile.batching.row_exchange import ExchangeSide, row_exchanges
from mmcompile.batching.schedule_units import action_lines, flow_of, num_slots, units_of
from mmcompile.batching.step_plan import MicrobatchPlan, RowExchange, StepPlan, ValueShape
from mmcompile.codegen.program import PreparedMicrobatch, ProgramSource
from mmcompile.data.collate import Sample, Value, check_labels, padded_alike, with_batch_dim
from mmcompile.data.collate import collate as collate_padded
from mmcompile.errors import BatchError, CaptureError, PlanError, VerifyError
from mmcompile.ir.graph import dtype_name
from mmcompile.planner.plan.placement import PlacedStage, Placement
from mmcompile.planner.schedule.schedule import Flow

Costs = Callable[[Sequence[Sample]], SampleCosts]
"""Function: samples of a step -> predicted seconds in each balance group (stages that share samples), the language model last."""
Collate = Callable[[Sequence[Sample], Sequence[int]], dict[str, Value]]
"""Function (samples, their numbers in error messages) -> one batch, by input name."""
_SCHEDULES = 4
"""Number of schedules kept, to be used again by steps with equal microbatches: one per step planned ahead, and one more."""
_Known: TypeAlias = dict[tuple[int, ...], PreparedMicrobatch]
"""Cache of prepared microbatches: indices of their samples -> batch and programs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedStep:
    """A step ready to run: its plan, programs, values, and the reason for its assignment."""

    plan: StepPlan
    prepared: tuple[PreparedMicrobatch, ...]
    """Programs and input values of each microbatch of the plan."""
    assignment: Assignment
    costs: SampleCosts
    """Predicted costs of the samples, without correction."""
    balance: str
    """Name of the chosen balancer, and the reason for the choice."""
    seconds: float
    """Seconds that planning took."""
    after: AccumulatedStep
    """Numbers of plans and samples since parameters were last updated, this one included; `NOTHING` if it updates them."""
    repeated: frozenset[int] = frozenset()
    """Indices of microbatches that another replica computes too, whose results are dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SampleGroup:
    """Samples that one replica of a balance group computes together."""

    tower: int
    replica: int
    slot: int
    lag: int
    samples: tuple[int, ...]
    repeats: bool = False
    """True if another replica computes these samples: this replica runs only to gather parameters, and its result is dropped."""


class StepPlanner:
    """Planner of steps, one after the other. A plan depends only on the step's samples unless measurements correct the costs.

    Args:
        placement: balance groups (stages that compute the same samples together), replicas and microbatches.
        source: finds the programs for a batch: those of the captured graph (pattern) that fits.
        collate: joins samples into a batch; None for `mmcompile.data.collate.collate`.
        balancer: assigns samples to replicas and microbatches.
        pad: padding value by key, as for `mmcompile.data.collate.collate`.
        costs: costs of samples; None if there is one balance group: then all samples cost the same.
        corrector: learns from measured times; None to take costs as predicted.
    """

    def __init__(
        self,
        placement: Placement,
        source: ProgramSource,
        *,
        balancer: Balancer,
        collate: Collate | None = None,
        pad: Mapping[str, int | float] | None = None,
        costs: Costs | None = None,
        corrector: Corrector | None = None,
    ) -> None:
        if costs is None and len(placement.towers) > 1:
            raise PlanError(
                f"towers {', '.join(placement.towers)} need the costs of samples, to know who takes part where"
            )
        self._towers = placement.towers
        self._placed = placement.stages
        self._of_replica: dict[tuple[str, int], list[PlacedStage]] = {}
        """(balance group, replica) -> its stages."""
        for stage in placement.stages:
            self._of_replica.setdefault((stage.tower, stage.replica), []).append(stage)
        shared = {stage.tower for stage in placement.stages if stage.sharing}
        self._sharing = {number for number, tower in enumerate(self._towers[:-1]) if tower in shared}
        """Numbers of the encoders' balance groups whose replicas share parameters."""
        self._grid = Grid(num_replicas=placement.num_replicas, num_microbatches=placement.num_microbatches)
        self._source = source
        self._collate = collate or (lambda samples, names: collate_padded(samples, pad, names))
        self._balancer = balancer
        self._pad = pad
        self._costs = costs or self._equal
        self._corrector = corrector
        self._measured: list[tuple[PlannedStep, np.ndarray]] = []
        self._learning_s = 0.0
        """Seconds that learning from the last measured step took."""
        self._flows: dict[tuple[str, int], Flow] = {}
        self._action_lines = functools.lru_cache(maxsize=_SCHEDULES)(
            functools.partial(action_lines, placement.stages, placement.schedule)
        )
        self._stages: tuple[tuple[str, ...], ...] = tuple(
            tuple(dict.fromkeys(s.program_name for s in placement.stages if s.tower == tower)) for tower in self._towers
        )

    def plan(
        self, step: int, samples: Sequence[Sample], *, update: bool = True, before: AccumulatedStep = NOTHING
    ) -> PlannedStep:
        """Plan one step, or one part of a step under gradient accumulation.

        Args:
            update: True if parameters are updated after this part.
            before: totals of the earlier parts of the step.

        Raises:
            BatchError: samples do not fit the model, or none has a label to learn from.
            CaptureError: the model cannot be captured on them.
            PlanError: the step cannot be scheduled.
        """
        start = time.perf_counter()
        self._learn()
        costs, assignment, reason = self._assigned(samples)
        known: _Known = {}
        planned = None
        try:
            planned = self._with(step, samples, assignment, known, update, before)
        except (BatchError, CaptureError) as error:
            refused = f"{reason} would need what the model refuses ({error})"
            for other, given, given_known, how in self._others(costs, samples, assignment, known):
                with contextlib.suppress(BatchError, CaptureError):
                    planned = self._with(step, given, other, given_known, update, before)
                    assignment, reason = other, f"{how}: {refused}"
                    break
            if planned is None:
                raise
        if self._corrector is not None:
            reason += f"; {self._corrector.report().summary}"
        plan, prepared, repeated = planned
        actions = self._action_lines(*units_of(plan, self._placed), num_slots(plan))
        return PlannedStep(
            plan=replace(plan, actions=actions),
            prepared=prepared,
            assignment=assignment,
            costs=costs,
            balance=reason,
            seconds=time.perf_counter() - start,
            after=before.with_part(plan),
            repeated=repeated,
        )

    def microbatches(self, samples: Sequence[Sample]) -> list[dict[str, Value]]:
        """Return the collated microbatches into which `plan` would divide a step's samples first, without their programs.

        Raises:
            BatchError: samples cannot be joined.
        """
        groups = dict.fromkeys(part.samples for part in self._parts(self._assigned(samples)[1]))
        return [self._collate([samples[index] for index in group], group) for group in groups]

    def _assigned(self, samples: Sequence[Sample]) -> tuple[SampleCosts, Assignment, str]:
        """Return (predicted costs of the samples, what the balancer assigns them to, the reason for this)."""
        if not samples:
            raise BatchError("a step needs at least one sample, got an empty list")
        check_labels(samples)
        costs = self._costs(samples)
        corrected = costs if self._corrector is None else self._corrector.corrected(costs)
        assignment, reason = self._balancer.explained(corrected, self._grid)
        assignment.check(corrected)
        return costs, assignment, reason

    def observe(self, planned: PlannedStep, seconds: np.ndarray) -> None:
        """Note the measured seconds of each microbatch, summed over all stages of its balance group; used to plan later steps.

        Args:
            planned: step that ran.
            seconds: float64 [microbatches of the plan].
        """
        if self._corrector is not None:
            self._measured.append((planned, seconds))

    def _learn(self) -> None:
        assert self._corrector is not None or not self._measured
        while self._measured and self._corrector is not None:
            start = time.perf_counter()
            planned, seconds = self._measured.pop(0)
            measured = {
                tower: np.full((count, self._grid.num_microbatches), np.nan)
                for tower, count in zip(self._towers, self._grid.num_replicas, strict=True)
            }
            for microbatch, taken in zip(planned.plan.microbatches, seconds.tolist(), strict=True):
                if microbatch.index in planned.repeated:
                    continue
                cell = measured[microbatch.tower]
                place = microbatch.replica, microbatch.slot
                cell[place] = taken + (0.0 if np.isnan(cell[place]) else cell[place])
            self._corrector.observe(planned.assignment, planned.costs, measured, self._learning_s)
            self._learning_s = time.perf_counter() - start

    def _others(
        self, costs: SampleCosts, samples: Sequence[Sample], assignment: Assignment, known: _Known
    ) -> Iterator[tuple[Assignment, Sequence[Sample], _Known, str]]:
        """Yield other ways to compute samples after the model refused an assignment, best first.

        Yields:
            (assignment, samples, cache of prepared microbatches, text that names the difference).
        """
        arrival = Arrival().assign(costs, self._grid)
        if arrival != assignment:
            yield arrival, samples, known, Arrival.name
        if len(self._towers) > 1:
            alike = padded_alike(samples, self._pad)
            if any(_sizes(one) != _sizes(with_batch_dim(other)) for one, other in zip(alike, samples, strict=True)):
                yield assignment, alike, {}, "media padded to the largest of the step"

    def _equal(self, samples: Sequence[Sample]) -> SampleCosts:
        return SampleCosts(components=self._towers, costs=np.ones((1, len(samples))))

    def _with(
        self,
        step: int,
        samples: Sequence[Sample],
        assignment: Assignment,
        known: _Known,
        update: bool,
        before: AccumulatedStep,
    ) -> tuple[StepPlan, tuple[PreparedMicrobatch, ...], frozenset[int]]:
        """Plan a step with a given assignment.

        Args:
            known: cache of prepared microbatches, to which new ones are added.

        Returns:
            (plan, its prepared microbatches, indices of microbatches that another replica computes too).
        """

        def prepare(group: tuple[int, ...]) -> PreparedMicrobatch:
            if group not in known:
                known[group] = self._source.prepare(self._collate([samples[i] for i in group], group))
            return known[group]

        parts = self._parts(assignment)
        prepared = tuple(prepare(part.samples) for part in parts)
        last = len(self._towers) - 1
        total = _num_tokens(prepared, parts, last, len(samples))
        count = total or len(samples)
        divisors, total_weight = (total, len(samples)), 1.0
        if not update or before.num_parts:
            before.check({p.programs.per_token for p, part in zip(prepared, parts, strict=True) if part.tower == last})
            unit = before.unit or unit_of(count)
            divisors, total_weight = (unit, unit), count / unit
        microbatches = tuple(
            self._microbatch(index, part, microbatch, divisors)
            for index, (part, microbatch) in enumerate(zip(parts, prepared, strict=True))
        )
        check_lockstep(microbatches, prepared, self._placed)
        plan = StepPlan(
            step=step,
            num_samples=len(samples),
            microbatches=microbatches,
            exchanges=self._exchanges(samples, lambda sample: prepare((sample,)), parts, prepared),
            num_tokens=total,
            update=update,
            total_weight=total_weight,
            first_sample=before.num_samples,
        )
        return plan, prepared, frozenset(index for index, part in enumerate(parts) if part.repeats)

    def _parts(self, assignment: Assignment) -> list[_SampleGroup]:
        """Return groups of samples that replicas compute together, sorted by slot (run order), lag (deferral), group, replica."""
        found: dict[tuple[int, int, int, int], list[int]] = {}
        last = assignment.microbatch[-1]
        for tower in range(len(self._towers)):
            slots, replicas = assignment.microbatch[tower], assignment.replica[tower]
            for sample in np.flatnonzero(slots != ABSENT).tolist():
                slot = int(slots[sample])
                key = (slot, int(last[sample]) - slot, tower, int(replicas[sample]))
                found.setdefault(key, []).append(sample)
        parts = {
            key: _SampleGroup(tower=key[2], replica=key[3], slot=key[0], lag=key[1], samples=tuple(samples))
            for key, samples in found.items()
        }
        for (slot, lag, tower, _), part in sorted(parts.items(), key=lambda item: (len(item[1].samples), item[0])):
            for replica in range(self._grid.num_replicas[tower]) if tower in self._sharing else ():
                # The smallest of the slot: it costs no time, as the others compute meanwhile.
                parts.setdefault((slot, lag, tower, replica), replace(part, replica=replica, repeats=True))
        return [part for _, part in sorted(parts.items())]

    def _microbatch(
        self, index: int, part: _SampleGroup, prepared: PreparedMicrobatch, divisors: tuple[float, float]
    ) -> MicrobatchPlan:
        flow = self._flow(prepared, part.tower)
        if not flow.stages:
            raise VerifyError(
                f"samples {part.samples} take part in {self._towers[part.tower]}, but the model does nothing there for them"
            )
        programs = [prepared.programs.programs[name] for name in flow.stages]
        readers = self._readers(part, prepared)
        reads = frozenset[str]().union(*readers.values())
        ports = [p for program in programs for p in (*program.inputs, *(o for o in program.outputs if o.peers))]
        dtypes = {port.name: port.dtype for port in ports if port.kind == "link"}
        return MicrobatchPlan(
            index=index,
            samples=part.samples,
            pattern=prepared.programs.pattern,
            sizes={p.name: prepared.sizes[p.name] for p in ports if p.kind == "size"},
            flow=flow,
            inputs=tuple(_shape(name, value) for name, value in prepared.values.items() if name in reads),
            links=tuple(
                ValueShape(name=name, shape=tuple(prepared.link_shapes[name]), dtype=dtype)
                for name, dtype in dtypes.items()
            ),
            loss_weight=_weight(prepared, len(part.samples), divisors),
            tower=self._towers[part.tower],
            replica=part.replica,
            slot=part.slot,
            lag=part.lag,
            number=part.slot + part.lag * self._grid.num_microbatches,
            readers=readers,
        )

    def _readers(self, part: _SampleGroup, prepared: PreparedMicrobatch) -> dict[int, tuple[str, ...]]:
        found: dict[int, frozenset[str]] = {}
        for stage in self._of_replica[self._towers[part.tower], part.replica]:
            if (program := prepared.programs.programs.get(stage.program_name)) is not None:
                found[stage.ranks[0]] = found.get(stage.ranks[0], frozenset()) | program.batch_inputs
        return {rank: tuple(sorted(names)) for rank, names in found.items() if names}

    def _exchanges(
        self,
        samples: Sequence[Sample],
        alone: Callable[[int], PreparedMicrobatch],
        parts: Sequence[_SampleGroup],
        prepared: Sequence[PreparedMicrobatch],
    ) -> tuple[RowExchange, ...]:
        sides = [
            ExchangeSide(index=index, samples=part.samples, prepared=microbatch)
            for index, (part, microbatch) in enumerate(zip(parts, prepared, strict=True))
        ]
        last = len(self._towers) - 1
        found: list[RowExchange] = []
        for tower in range(last):
            sources = [
                side for side, part in zip(sides, parts, strict=True) if part.tower == tower and not part.repeats
            ]
            targets = [side for side, part in zip(sides, parts, strict=True) if part.tower == last]
            makers, readers = self._stages[tower], self._stages[last]
            found += row_exchanges(sources, targets, makers, readers, samples=samples, alone=alone)
        return tuple(found)

    def _flow(self, prepared: PreparedMicrobatch, tower: int) -> Flow:
        key = prepared.programs.pattern, tower
        if key not in self._flows:
            self._flows[key] = flow_of(prepared.programs, self._stages[tower])
        return self._flows[key]


def _sizes(sample: Sample) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in sample.items() if isinstance(value, Tensor)}


def _num_tokens(
    prepared: Sequence[PreparedMicrobatch], parts: Sequence[_SampleGroup], last: int, num_samples: int
) -> int:
    """Return the number of tokens with loss in a step; 0 if the loss is not per token."""
    learning = [microbatch for microbatch, part in zip(prepared, parts, strict=True) if part.tower == last]
    counted = [microbatch for microbatch in learning if microbatch.programs.per_token]
    for microbatch in counted:
        if microbatch.num_tokens is None:
            raise VerifyError(
                f"pattern {microbatch.programs.pattern} has a loss per token, but its tokens were not counted"
            )
    total = sum(microbatch.num_tokens or 0 for microbatch in counted)
    if counted and not total:
        raise BatchError(f"the step has no token to learn from: 0 valid labels in {num_samples} samples")
    return total


def _weight(microbatch: PreparedMicrobatch, num_samples: int, divisors: tuple[float, float]) -> float:
    if microbatch.num_tokens == 0:
        return 0.0
    tokens, samples = divisors
    return 1 / tokens if microbatch.programs.per_token else num_samples / samples


def _shape(name: str, value: Tensor) -> ValueShape:
    return ValueShape(name=name, shape=tuple(value.shape), dtype=dtype_name(value.dtype))
