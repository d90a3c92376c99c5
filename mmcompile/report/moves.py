"""Simulated step time of a plan with a cut moved by a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from mmcompile.planner.plan.bottlenecks import chain_of_stage, memory_bytes, rank_loads
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Segment, Stage, StagePrediction
from mmcompile.report.step_replay import replay


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShare:
    """Fractions of a stage's times and bytes that one of its layers has, 0..1 each."""

    forward: float
    input_grad: float
    weight_grad: float
    parameters: float
    gradients: float
    activations: float

    def __add__(self, other: LayerShare) -> LayerShare:
        return LayerShare(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(LayerShare)})


def _equal(share: float) -> LayerShare:
    return LayerShare(**{f.name: share for f in fields(LayerShare)})


Shares = Mapping[str, Sequence[LayerShare]]
"""Stage name -> fractions of the stage's times and bytes that each of its layers has, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A stage boundary moved by some layers, and the simulated result."""

    layers: tuple[str, ...]
    source: str
    target: str
    iteration_s: float
    change: float
    """Relative change of the step time, both plans simulated alike."""
    over_bytes: int
    """Bytes by which the fullest rank exceeds its memory; 0 if it does not."""

    def __str__(self) -> str:
        what = self.layers[0] if len(self.layers) == 1 else f"{len(self.layers)} layers from {self.layers[0]} on"
        verdict = "no change" if abs(self.change) < 0.0005 else f"{self.change:+.1%}"
        over = f", but {self.over_bytes / 2**30:.1f} GiB more than fits" if self.over_bytes else ""
        return f"{what} moved to {self.target}: step {self.iteration_s * 1e3:.4g} ms ({verdict}){over}"


def equal_shares(plan: Plan) -> Shares:
    """Return stage name -> 1/n of its times and bytes for each of its n layers, as a plan has no costs of single layers."""
    counts = {stage.name: len(stage.layer_names) for stage in plan.stages}
    return {name: [_equal(1 / count)] * count for name, count in counts.items()}


def boundary_moves(plan: Plan, stage: Stage, shares: Shares) -> tuple[Move, ...]:
    """Return the simulated results of moving a stage's first layer to the stage before, and its last to the stage after."""
    return tuple(
        move
        for position, step in ((0, -1), (len(stage.layer_names) - 1, 1))
        if (move := move_layers(plan, stage, position, step, shares)) is not None
    )


def move_layers(plan: Plan, stage: Stage, position: int, step: int, shares: Shares) -> Move | None:
    """Return the simulated result of moving a stage's layer at `position` to the stage before (`step` -1) or after it (+1).

    Layers between that layer and the other stage move too. Return None if there is no such stage, if `stage` would be empty,
    or if only one of the two stages runs a backward. `shares`: fraction of its stage's times and bytes that each layer has.
    """
    chain = chain_of_stage(plan, stage.name)
    index = chain.stages.index(stage)
    count = len(stage.layer_names)
    moved = range(0, position + 1) if step < 0 else range(position, count)
    if not 0 <= index + step < len(chain.stages) or len(moved) == count:
        return None
    target = chain.stages[index + step]
    if target.has_backward != stage.has_backward:
        return None
    share = sum((shares[stage.name][layer] for layer in moved), _equal(0.0))
    changed = {stage.name: _without(stage, moved, share), target.name: _with(target, stage, moved, share, step)}
    stages = tuple(changed.get(own.name, own) for own in chain.stages)
    other = replace(plan, chains=tuple(replace(own, stages=stages) if own is chain else own for own in plan.chains))
    before_s, after_s = replay(plan).iteration_s, replay(other).iteration_s
    fullest = max(load.num_bytes for load in rank_loads(other))
    return Move(
        layers=tuple(stage.layer_names[layer] for layer in moved),
        source=stage.name,
        target=target.name,
        iteration_s=after_s,
        change=after_s / before_s - 1,
        over_bytes=max(0, fullest - memory_bytes(plan)),
    )


def _without(stage: Stage, moved: range, share: LayerShare) -> Stage:
    kept = [layer for layer in range(len(stage.layer_names)) if layer not in moved]
    return replace(
        stage,
        layer_names=tuple(stage.layer_names[layer] for layer in kept),
        segments=_segments([stage.layers[layer] for layer in kept]),
        prediction=_plus(stage.prediction, _scaled(stage, share, stage.prediction.in_flight), -1),
    )


def _with(target: Stage, source: Stage, moved: range, share: LayerShare, step: int) -> Stage:
    names = tuple(source.layer_names[layer] for layer in moved)
    layers, own = [source.layers[layer] for layer in moved], target.layers
    return replace(
        target,
        layer_names=(*target.layer_names, *names) if step < 0 else (*names, *target.layer_names),
        segments=_segments([*own, *layers] if step < 0 else [*layers, *own]),
        prediction=_plus(target.prediction, _scaled(source, share, target.prediction.in_flight), 1),
    )


def _segments(layers: Sequence[tuple[str, int]]) -> tuple[Segment, ...]:
    runs = ((component, [index for _, index in run]) for component, run in groupby(layers, key=lambda each: each[0]))
    return tuple(Segment(component=component, first=run[0], last=run[-1] + 1) for component, run in runs)


def _scaled(stage: Stage, share: LayerShare, in_flight: int) -> StagePrediction:
    """Return a stage's predicted times and bytes for a share of its layers, with `in_flight` microbatches in memory at a time."""
    predicted = stage.prediction
    return StagePrediction(
        forward_s=predicted.forward_s * share.forward,
        input_grad_s=predicted.input_grad_s * share.input_grad,
        weight_grad_s=predicted.weight_grad_s * share.weight_grad,
        parameter_bytes=round(predicted.parameter_bytes * share.parameters),
        gradient_bytes=round(predicted.gradient_bytes * share.gradients),
        optimizer_bytes=round(predicted.optimizer_bytes * share.gradients),
        activation_bytes=round(in_flight * predicted.saved_bytes * share.activations),
        in_flight=in_flight,
    )


def _plus(one: StagePrediction, two: StagePrediction, sign: int) -> StagePrediction:
    summed = {
        f.name: max(0, getattr(one, f.name) + sign * getattr(two, f.name))
        for f in fields(StagePrediction)
        if f.name != "in_flight"
    }
    return StagePrediction(**summed, in_flight=one.in_flight)
