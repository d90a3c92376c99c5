"""`Balancer`: from the costs of a step's samples to an `Assignment`. Same costs, same grid, same bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.assignment import ABSENT, Assignment, Grid, SampleCosts, assignment_of, groups
from mmcompile.batching.balance.lpt import lpt
from mmcompile.errors import ConfigError

Share = Callable[[np.ndarray, int], np.ndarray]
"""Weights [samples] and a number of replicas -> replica of each sample."""


class Balancer(ABC):
    """One way to balance. Fields of subclasses are its options."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign every sample to a place in every component with work for it.

        Raises:
            ConfigError: the costs lack what this balancer needs, or nothing keeps to its limits.
        """

    def explained(self, costs: SampleCosts, grid: Grid) -> tuple[Assignment, str]:
        """Return the result of `assign`, with an explanation for the user."""
        return self.assign(costs, grid), self.title

    @property
    def title(self) -> str:
        """Name with these options; the registry's name where it has one."""
        return self.name


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BottleneckBalancer(Balancer):
    """A balancer that is shown what samples cost the slowest stage of each component: a pipeline is as fast as that."""

    name: ClassVar[str] = "in-slowest-stage"

    inner: Balancer
    shares: Mapping[str, float]
    """Component -> the part of its cost that its slowest stage has; 1 for those not given."""

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign by the costs of the slowest stages."""
        return self.inner.assign(of_slowest_stages(costs, self.shares), grid)

    @property
    def title(self) -> str:
        """Title of the inner balancer."""
        return self.inner.title


def of_slowest_stages(costs: SampleCosts, shares: Mapping[str, float]) -> SampleCosts:
    """Return the costs of samples to the slowest stage of each component.

    Args:
        shares: as of `BottleneckBalancer`.

    Raises:
        ConfigError: a share names a component without costs.
    """
    unknown = shares.keys() - set(costs.components)
    if unknown:
        raise ConfigError(
            f"shares of {', '.join(sorted(unknown))}; the step has costs of {', '.join(costs.components)}"
        )
    if not shares:
        return costs
    return replace(costs, costs=costs.costs * np.array([[shares.get(name, 1.0)] for name in costs.components]))


def check_grid(costs: SampleCosts, grid: Grid) -> None:
    """Raises ConfigError if the grid is of other components than the costs."""
    if len(grid.num_replicas) != len(costs.components):
        raise ConfigError(
            f"replicas of {len(grid.num_replicas)} components for costs of {len(costs.components)}; give one number for each of "
            f"{', '.join(costs.components)}"
        )


def together(
    costs: SampleCosts, grid: Grid, replica: np.ndarray, microbatch: np.ndarray, share: Share = lpt
) -> Assignment:
    """All components compute a sample in the same microbatch.

    A component with as many replicas as the last one computes it in the same replica. Another one shares the samples of all
    replicas' microbatches of that number among its own.

    Args:
        replica: int [samples], of the last component; so too `microbatch`.
        share: how; by default the heaviest sample goes to the lightest replica.
    """
    replicas = [
        replica if count == grid.num_replicas[-1] else shared(costs, row, microbatch, count, share)
        for row, count in enumerate(grid.num_replicas)
    ]
    return assignment_of(costs, grid, replicas, microbatch)


def shared(costs: SampleCosts, row: int, microbatch: np.ndarray, num_replicas: int, share: Share = lpt) -> np.ndarray:
    """Share the samples of every microbatch among replicas: int64 [samples], 0 for those that take no part.

    Args:
        row: of the component.
        microbatch: int [samples].
    """
    weights = costs.costs[row]
    return shared_by(microbatch, weights > 0, num_replicas, lambda members, count: share(weights[members], count))


def shared_by(
    microbatch: np.ndarray, takes_part: np.ndarray, num_replicas: int, share: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """Like `shared`, by a function of the members (indices of samples, ascending) and the number of replicas."""
    replica = np.zeros(len(microbatch), dtype=np.int64)
    for _, members in groups(np.where(takes_part, microbatch, ABSENT)):
        replica[members] = share(members, num_replicas)
    return replica


def equal_runs(count: int, parts: int) -> np.ndarray:
    """Part of each of `count` things cut into runs whose sizes differ by at most one, the first ones larger: int64 [count]."""
    size, larger = divmod(count, parts)
    return np.repeat(np.arange(parts), size + (np.arange(parts) < larger))
