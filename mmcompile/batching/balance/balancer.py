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
"""Function (weights float64 [samples], number of replicas) -> replica of each sample, int64 [samples]."""


class Balancer(ABC):
    """Base of balancers, which assign the samples of a step to replicas and microbatches. Fields of subclasses are options."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign every sample to a place in every component with work for it.

        Raises:
            ConfigError: the costs lack lengths that this balancer needs, or no assignment was found within its limits.
        """

    def explained(self, costs: SampleCosts, grid: Grid) -> tuple[Assignment, str]:
        """Return the result of `assign`, and an explanation for the user."""
        return self.assign(costs, grid), self.title

    @property
    def title(self) -> str:
        """Balancer name with its non-default options; the registry's name if it is registered."""
        return self.name


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BottleneckBalancer(Balancer):
    """Balancer that runs `inner` on the costs of each component's slowest stage, because that stage limits a pipeline's speed."""

    name: ClassVar[str] = "in-slowest-stage"

    inner: Balancer
    shares: Mapping[str, float]
    """Component -> fraction of its cost that is in its slowest stage; 1 for components not given."""

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign samples with `inner`, by the costs of the slowest stages."""
        return self.inner.assign(of_slowest_stages(costs, self.shares), grid)

    @property
    def title(self) -> str:
        """Title of the inner balancer."""
        return self.inner.title


def of_slowest_stages(costs: SampleCosts, shares: Mapping[str, float]) -> SampleCosts:
    """Return sample costs multiplied by the share of each component's slowest stage.

    Args:
        shares: component -> fraction of its cost that is in its slowest stage; 1 for components not given.

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
    """Raise ConfigError if the grid has replica counts for another number of components than the costs."""
    if len(grid.num_replicas) != len(costs.components):
        raise ConfigError(
            f"replicas of {len(grid.num_replicas)} components for costs of {len(costs.components)}; give one number for each of "
            f"{', '.join(costs.components)}"
        )


def together(
    costs: SampleCosts, grid: Grid, replica: np.ndarray, microbatch: np.ndarray, share: Share = lpt
) -> Assignment:
    """Return an assignment in which all components compute a sample in the same microbatch.

    A component with as many replicas as the last one computes it in the same replica. Any other component divides the samples
    that all replicas have in microbatch k among its own replicas, for each k.

    Args:
        replica, microbatch: int [samples], places in the last component.
        share: function that divides samples among replicas; by default LPT (the heaviest sample to the lightest replica).
    """
    replicas = [
        replica if count == grid.num_replicas[-1] else shared(costs, row, microbatch, count, share)
        for row, count in enumerate(grid.num_replicas)
    ]
    return assignment_of(costs, grid, replicas, microbatch)


def shared(costs: SampleCosts, row: int, microbatch: np.ndarray, num_replicas: int, share: Share = lpt) -> np.ndarray:
    """Divide each microbatch's samples among a component's replicas; return the replicas, int64 [samples], 0 without work.

    Args:
        row: index of the component.
        microbatch: microbatch of each sample, int [samples].
    """
    weights = costs.costs[row]
    return shared_by(microbatch, weights > 0, num_replicas, lambda members, count: share(weights[members], count))


def shared_by(
    microbatch: np.ndarray, takes_part: np.ndarray, num_replicas: int, share: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """Divide each microbatch's samples among a component's replicas; return the replicas, int64 [samples], 0 without work.

    Args:
        takes_part: bool [samples], True for samples with work in the component.
        share: function (sample indices of a microbatch, number of replicas) -> replica of each of these samples.
    """
    replica = np.zeros(len(microbatch), dtype=np.int64)
    for _, members in groups(np.where(takes_part, microbatch, ABSENT)):
        replica[members] = share(members, num_replicas)
    return replica


def equal_runs(count: int, parts: int) -> np.ndarray:
    """Cut `count` items into `parts` runs, sizes differing by at most 1, larger first; return each item's run, int64 [count]."""
    size, larger = divmod(count, parts)
    return np.repeat(np.arange(parts), size + (np.arange(parts) < larger))
