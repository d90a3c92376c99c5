"""`RankGradients`: gradients of one rank's parameters over the calls of a step, and their sums over ranks."""

# pyright: reportPrivateImportUsage=false
# torch re-exports the functions its optimizers are built on without saying so.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import nn

from mmcompile.config import Reduction
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.optim.gradient_bucket import OwnerSet
from mmcompile.runtime.optim.gradients import CarriedSums, GradientSums
from mmcompile.runtime.optim.optimizer import RankState
from mmcompile.runtime.optim.sharded_optimizer import NewValues

_EPSILON = 1e-6
"""Number added to the gradients' norm before clipping divides by it, as in torch.nn.utils.clip_grad_norm_."""


@final
class RankGradients:
    """Sums the gradients of one rank's parameters over the ranks that hold them, and over calls without an update."""

    def __init__(self, groups: Groups, stages: Sequence[PlacedStage], state: RankState, reduction: Reduction) -> None:
        self._groups = groups
        self._stages = stages
        self._rank_of = [stage.ranks[0] for stage in stages]
        self._repeats = [stage.repeats for stage in stages]
        self._state = state
        self._reduction: Reduction = reduction
        self._held: dict[tuple[tuple[int, ...], int | None], list[str]] = {}
        """Names of trainable parameters on several ranks, by (placed stages that hold them, updating rank or None for all)."""
        self._updaters: Mapping[str, int] = {}
        """Rank that updates a parameter, by name, where not all its owners update it."""
        self._ran: set[int] = set()
        """Indices of placed stages that ran a backward in this step, on any rank."""
        self._carried = self._nothing_carried()
        """Sums of this step's gradients from earlier calls, which accumulated without an update."""
        self._carried_weight = 0.0
        """Sum of the loss weights of this step's calls."""
        self._new_values: NewValues | None = None
        """New parameter values in transfer since the last update; None if there are none."""
        self._counted: set[str] = set()
        """Names of parameters whose gradient this rank counts in the global norm."""
        self.names: tuple[str, ...] = ()
        """Names of all trainable parameters of the model so far, sorted."""

    def hold(self, holders: Mapping[str, tuple[int, ...]], updaters: Mapping[str, int]) -> None:
        """Set which stages, by index in the placement, hold each trainable parameter, and the rank that updates it."""
        self._held = {}
        self._updaters = updaters
        self.names = tuple(sorted(holders))
        self._counted = set()
        for name, stages in holders.items():
            owners = self._owners(stages)
            if len(owners) > 1:
                self._held.setdefault((stages, updaters.get(name)), []).append(name)
            if updaters.get(name, min(owners)) == self._groups.rank:
                self._counted.add(name)

    def updates(self, name: str) -> bool:
        """Return whether this rank updates a parameter that it holds."""
        return self._updaters.get(name, self._groups.rank) == self._groups.rank

    def begin(self, ran: Iterable[int], backwards: Mapping[str, int], *, update: bool) -> GradientSums | CarriedSums:
        """Return the collector of a call's gradients: it sums them over ranks if `update`, else keeps them for later calls.

        Args:
            ran: indices in the placement of the stages (per replica and shard) that run a backward in the call, on any rank.
            backwards: number of this rank's backwards that touch a parameter, by name.
        """
        self._ran |= set(ran)
        if not update:
            self._carried.parameters = self._state.trainable
            return self._carried
        return GradientSums(
            self._groups,
            self._state.trainable,
            self._shared(),
            backwards,
            reduction=self._reduction,
            masters=self._state.optimizer.masters,
            carried=self._carried,
        )

    def weigh(self, weight: float, *, update: bool) -> None:
        """Add a call's loss weight to the step's. Before an update, divide gradients by the sum of the step's weights."""
        self._carried_weight += weight
        if update and self._carried_weight != 1:
            _scale(self._state.optimizer.updated.values(), 1 / self._carried_weight)

    def squared_norms(self) -> dict[str, float]:
        """Return the squared norm of each gradient that this rank counts in the global norm, by name; one rank counts each.

        Norms are computed in the precision of the gradient and squared in float64.
        """
        updated = self._state.optimizer.updated
        found = {name: updated[name].grad for name in sorted(self._counted)}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        if not gradients:
            return {}
        norms = torch._foreach_norm(list(gradients.values()))  # pyright: ignore[reportPrivateUsage]
        squares = torch.stack([norm.double().cpu() for norm in norms]).square()
        return dict(zip(gradients, squares.tolist(), strict=True))

    def clip(self, squared_norm: float, limit: float) -> None:
        """Multiply all gradients by min(1, limit / norm), from the squared global norm over all ranks."""
        factor = limit / (math.sqrt(squared_norm) + _EPSILON)
        if factor < 1:
            _scale(self._state.optimizer.updated.values(), factor)

    def publish(self) -> None:
        """Start to send this rank's updated parameters to the ranks that hold them without updating them."""
        if self._updaters:
            self._new_values = NewValues(self._groups, self._state.trainable, self._shared())

    def settle(self) -> None:
        """Wait for new parameter values that other ranks send to this one."""
        if self._new_values is not None:
            self._new_values.finish()
            self._new_values = None

    def drop(self) -> None:
        """Drop all gradients, and the sums of gradients from calls without an update, so that a new step can begin."""
        for parameter in self._state.trainable.values():
            parameter.grad = None
        self._state.optimizer.zero_grad()
        self._carried = self._nothing_carried()
        self._carried_weight = 0.0
        self._ran.clear()

    def _nothing_carried(self) -> CarriedSums:
        return CarriedSums(self._reduction, master_weights=self._state.optimizer.masters is not None)

    def _owners(self, stages: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self._rank_of[index] for index in stages}))

    def _shared(self) -> list[OwnerSet]:
        """Return the owner sets of parameters that several ranks hold. Owners without a backward in the step give no gradient."""
        names: dict[tuple[tuple[int, ...], tuple[int, ...], int | None], list[str]] = {}
        for (stages, updater), held in self._held.items():
            # All shards of tensors have the same gradient of what they all hold whole.
            counted = [index for index in stages if not self._repeats[index]] or stages
            ends = self._owners(stages), self._owners(index for index in counted if index in self._ran), updater
            names.setdefault(ends, []).extend(held)
        return [
            OwnerSet(names=tuple(held), owners=owners, givers=givers, updater=updater)
            for (owners, givers, updater), held in names.items()
        ]


def _scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateUsage]
