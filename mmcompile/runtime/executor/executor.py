"""`Executor`: one rank's part of one step, forwards, backwards and messages in the order of its action list."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mmcompile.batching.step_plan import StepPlan
from mmcompile.codegen.weight_grad_split import DeferredGradient
from mmcompile.kernels.process_groups import ExchangeLost
from mmcompile.planner.schedule.schedule import Action, ActionKind
from mmcompile.runtime.comm.groups import Groups, PeerLost
from mmcompile.runtime.executor.loaded_stage import InputSlot, LoadedStage, OutputSlot, Stages
from mmcompile.runtime.executor.p2p import P2P
from mmcompile.runtime.executor.totals import OwnTotals
from mmcompile.runtime.monitoring.fail_points import fail_point
from mmcompile.runtime.monitoring.status import IDLE, StatusBoard
from mmcompile.runtime.optim.gradients import CarriedSums, GradientSums

_KINDS = {kind: position for position, kind in enumerate(ActionKind)}


@dataclass(kw_only=True, slots=True)
class ReceivedValue:
    """A value of one microbatch received from another stage, whose gradient is returned to that stage.

    An autograd leaf would keep the value's memory until the backward, even if no operation of the backward reads the value. So
    the value enters the stage through an autograd node that receives the value's gradient but holds no reference to the value.
    """

    slot: InputSlot
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    gradient: Tensor | None = None

    @classmethod
    def of(cls, slot: InputSlot, value: Tensor) -> ReceivedValue:
        """Return a record of the input's `slot` and the shape, dtype and device of `value`, without a reference to `value`."""
        return cls(slot=slot, shape=value.shape, dtype=value.dtype, device=value.device)

    def enter(self, value: Tensor) -> Tensor:
        """Return the value as the stage's input: same memory, on a new autograd node that passes its gradient to this object."""
        return _Boundary.apply(value, torch.zeros((), requires_grad=True), self)

    def take_gradient(self) -> Tensor:
        """Return the gradient of the received value; zeros if the backward did not reach it."""
        gradient, self.gradient = self.gradient, None
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if gradient is None else gradient


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, received: ReceivedValue) -> Tensor:
        """Return a view of `value`. It requires grad as `anchor` does, so that autograd calls `backward`; `value` does not."""
        ctx.received = received
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.received.gradient = gradient
        return None, None, None


@dataclass(frozen=True, slots=True)
class _Saved:
    """Parts of a forward on one microbatch that its backward needs; only graph edges of results, so their data can be freed."""

    received: list[ReceivedValue]
    edges: list[tuple[OutputSlot, GradientEdge | None]]
    loss: tuple[GradientEdge, Tensor] | None
    """Graph edge of the loss, and the gradient that its backward starts from: the microbatch's loss weight."""
    deferred: tuple[DeferredGradient, ...]
    """Weight gradients that are computed later, by action W, and not in the backward."""


class Executor:
    """Runs the actions of one step on one rank. Results and inputs of a microbatch are freed after its backward."""

    def __init__(
        self,
        plan: StepPlan,
        loaded: Sequence[Stages],
        p2p: P2P,
        board: StatusBoard,
        groups: Groups,
        sums: GradientSums | CarriedSums,
        *,
        seed: int,
        trace: bool,
        check: Callable[[], None],
    ) -> None:
        """Prepare a step.

        Args:
            loaded: this rank's stages, per microbatch of the step; empty for a microbatch that only other ranks run.
            sums: called after every backward; it takes the gradients that the backward left in `.grad`.
            seed: random seed of the job. Each forward combines it with the step, the stage and the first sample of the
                microbatch, so that its random numbers do not depend on the rank or on other microbatches.
            check: called before every action; an exception it raises ends the step.
        """
        self._plan = plan
        self._seed = seed
        self._loaded = loaded
        self._p2p = p2p
        self._board = board
        self._sums = sums
        self._rank = groups.rank
        self._generator = _generator(groups.device)
        self._trace = trace
        self._check = check
        self._backward = [frozenset(microbatch.flow.backward) for microbatch in plan.microbatches]
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._deferred: dict[tuple[int, int], tuple[DeferredGradient, ...]] = {}
        """Weight gradients between actions I and W, by (microbatch, stage)."""
        self._losses: list[tuple[int, Tensor, Tensor | int]] = []
        """(index of the microbatch, loss, number of valid tokens) of each loss computed in this step."""

    def run(self, actions: Sequence[Action]) -> OwnTotals:
        """Execute the action list to its end, and return losses [microbatches, 1], tokens, seconds and events.

        Raises PeerLost if the connection to another rank is lost.
        """
        try:
            return self._run(actions)
        except ExchangeLost as error:
            raise PeerLost(str(error)) from error

    def _run(self, actions: Sequence[Action]) -> OwnTotals:
        seconds = torch.zeros(len(self._plan.microbatches), dtype=torch.float64)
        result = OwnTotals(losses=torch.zeros(len(seconds), 1, dtype=torch.float64), seconds=seconds)
        before = self._generator.get_state()
        for action in actions:
            self._check()
            self._board.write(self._rank, self._plan.step, action.stage, _KINDS[action.kind], action.microbatch)
            start = time.perf_counter()
            if action.kind.is_send:
                self._p2p.send(action)
            elif action.kind.is_receive:
                fail_point("receive", rank=self._rank, step=self._plan.step)
                self._p2p.receive(action)
            else:
                microbatch = self._compute(action)
                seconds[microbatch] += time.perf_counter() - start
            if self._trace:
                result.events.append((action, start, time.perf_counter()))
        # On rank 0 the generator is the user's.
        self._generator.set_state(before)
        self._board.write(self._rank, self._plan.step, IDLE, 0, 0)
        for microbatch, loss, tokens in self._losses:
            result.losses[microbatch] += loss.double().cpu() * self._plan.microbatches[microbatch].loss_weight
            result.num_tokens += int(tokens)
        return result

    def _compute(self, action: Action) -> int:
        microbatch = self._p2p.microbatch(action.stage, action.microbatch)
        stage = self._loaded[microbatch][action.stage]
        match action.kind:
            case ActionKind.F:
                self._run_forward(stage, microbatch, stage.name in self._backward[microbatch])
            case ActionKind.W:
                self._run_weight_gradients(stage, microbatch)
            case _:
                self._run_backward(stage, microbatch)
                if action.kind is ActionKind.B:
                    self._run_weight_gradients(stage, microbatch)
        return microbatch

    def _run_forward(self, stage: LoadedStage, microbatch: int, backward: bool) -> None:
        received: list[ReceivedValue] = []
        arguments = self._arguments(stage, microbatch, received if backward else None)
        first = self._plan.first_sample + min(self._plan.microbatches[microbatch].samples)
        self._generator.manual_seed(_key(self._seed, self._plan.step, first, stage.key))
        with torch.set_grad_enabled(backward):
            results, deferred = stage.run.run_deferring(*arguments)
        edges: list[tuple[OutputSlot, GradientEdge | None]] = []
        for slot in stage.outputs:
            value = results[slot.position]
            if backward and slot.gradient:
                edges.append((slot, get_gradient_edge(value) if value.requires_grad else None))
            self._p2p.put_value(microbatch, stage.index, slot, value)
        loss = self._keep_loss(stage, results, microbatch)
        if backward:
            self._saved[microbatch, stage.index] = _Saved(received, edges, loss, deferred)

    def _arguments(
        self, stage: LoadedStage, microbatch: int, received: list[ReceivedValue] | None
    ) -> list[Tensor | int]:
        roots: Mapping[str, Tensor] = self._p2p.batch_inputs(microbatch)
        sizes = self._plan.microbatches[microbatch].sizes
        arguments: list[Tensor | int] = []
        for slot in stage.inputs:
            if slot.kind == "link":
                value = self._p2p.take_value(microbatch, stage.index, slot)
                if received is not None and slot.gradient:
                    received.append(ReceivedValue.of(slot, value))
                    value = received[-1].enter(value)
                arguments.append(value)
            else:
                arguments.append(sizes[slot.name] if slot.kind == "size" else roots[slot.name])
        return arguments

    def _keep_loss(
        self, stage: LoadedStage, results: Sequence[Tensor], microbatch: int
    ) -> tuple[GradientEdge, Tensor] | None:
        """Store the loss of a microbatch, and return its graph edge and starting gradient; None if it needs no backward.

        A microbatch without valid tokens is skipped: its mean would be 0 / 0.
        """
        weight = self._plan.microbatches[microbatch].loss_weight
        if stage.loss is None or weight == 0:
            return None
        loss = results[stage.loss]
        self._losses.append((microbatch, loss.detach(), 0 if stage.tokens is None else results[stage.tokens]))
        return (get_gradient_edge(loss), torch.full_like(loss, weight)) if loss.requires_grad else None

    def _run_backward(self, stage: LoadedStage, microbatch: int) -> None:
        fail_point("backward", rank=self._rank, step=self._plan.step)
        saved = self._saved.pop((microbatch, stage.index))
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for slot, edge in saved.edges:
            gradient = self._p2p.take_gradient(microbatch, stage.index, slot)
            if edge is not None:
                edges.append(edge)
                gradients.append(gradient)
        if saved.loss is not None:
            edges.append(saved.loss[0])
            gradients.append(saved.loss[1])
        if edges:
            torch.autograd.backward(edges, gradients)
        for value in saved.received:
            self._p2p.put_gradient(microbatch, stage.index, value.slot, value.take_gradient())
        self._deferred[microbatch, stage.index] = saved.deferred

    def _run_weight_gradients(self, stage: LoadedStage, microbatch: int) -> None:
        for gradient in self._deferred.pop((microbatch, stage.index)):
            gradient.add()
        self._sums.ran(stage.trainable)


def num_backwards(plan: StepPlan, loaded: Sequence[Stages]) -> Counter[str]:
    """Return the number of this rank's backwards in a step that touch each trainable parameter, by name.

    Args:
        loaded: per microbatch, the stages by which this rank runs it.
    """
    return Counter(
        name
        for microbatch, stages in zip(plan.microbatches, loaded, strict=True)
        for stage in stages.values()
        if stage.name in microbatch.flow.backward
        for name in stage.trainable
    )


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = (key * 1_000_003 + part) % 2**63
    return key
