"""Gradients summed by real processes, one a rank, as backwards run; and what each then holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mmcompile.config import Reduction
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.optim.gradient_bucket import OwnerSet
from mmcompile.runtime.optim.gradients import CarriedSums, GradientSums
from mmcompile.runtime.optim.master_weights import HALF, MasterWeights
from support.processes.spawn_ranks import RankContext, spawn_ranks

BUCKET_BYTES = 2**17
Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who shares what, and each rank's own backwards."""

    reduction: Reduction
    shared: tuple[OwnerSet, ...]
    held: tuple[tuple[str, ...], ...]
    """Per rank, its parameters."""
    backwards: tuple[tuple[Gradients, ...], ...]
    """Per rank and backward, in the order in which they run: what it gives to the parameters that it touches."""
    values: Mapping[str, Tensor]
    """Of the parameters."""
    masters: bool = False
    """Half-precision parameters have float32 masters, on the ranks that update them."""
    earlier: int = 0
    """Backwards of each rank that belong to calls of the step before the last, one a call."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds after a step."""

    gradients: Gradients
    """Of masters where there are any."""
    faults: Mapping[str, float]


def summed(cases: Sequence[Case], num_ranks: int) -> list[list[Held]]:
    """Sum all cases in one set of processes; per case, return what each rank holds then."""
    return spawn_ranks(_on_rank, cases, num_ranks)


def _on_rank(context: RankContext, case: Case) -> Held:
    return run_case(context.groups, case)


def run_case(groups: Groups, case: Case) -> Held:
    """This rank's part: backwards through real autograd, then the sums."""
    parameters = {name: nn.Parameter(case.values[name]) for name in case.held[groups.rank]}
    masters = MasterWeights() if case.masters else None
    updaters = {name: item.updater for item in case.shared for name in item.names if item.updater is not None}
    for name, parameter in parameters.items():
        if masters is not None and parameter.dtype in HALF and updaters.get(name, groups.rank) == groups.rank:
            masters.add(name, parameter)
    backwards = case.backwards[groups.rank]
    carried = CarriedSums(case.reduction, master_weights=case.masters)
    for given in backwards[: case.earlier]:
        carried.parameters = parameters
        _backward(parameters, given)
        carried.ran(given)
        assert carried.finish() == {}
    counts = Counter(name for given in backwards[case.earlier :] for name in given)
    sums = GradientSums(
        groups,
        parameters,
        case.shared,
        counts,
        reduction=case.reduction,
        masters=masters,
        carried=carried,
        bucket_bytes=BUCKET_BYTES,
    )
    for given in backwards[case.earlier :]:
        _backward(parameters, given)
        sums.ran(given)
    faults = sums.finish()
    targets = {**parameters, **(masters or {})}
    return Held(gradients={name: target.grad for name, target in targets.items()}, faults=faults)


def _backward(parameters: Mapping[str, nn.Parameter], given: Gradients) -> None:
    for name, gradient in given.items():
        if gradient is not None:
            # A copy, since autograd may keep what it is given, and add to it.
            parameters[name].view_as(parameters[name]).backward(gradient.clone())
