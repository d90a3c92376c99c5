"""Post-balancing: once a step's samples are drawn, each component balances them over its replicas independently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts, assignment_of
from mmcompile.batching.balance.balancer import Balancer, check_grid, shared_by
from mmcompile.batching.balance.lengths import convolution, padded, quadratic
from mmcompile.batching.balance.lpt import lpt
from mmcompile.errors import ConfigError


class Algorithm(StrEnum):
    """OrchMLLM algorithm, named after the quantity that it balances in one component."""

    SECONDS = "seconds"
    """Algorithm 1 (LPT) on costs in seconds: the cost of a batch is the sum of its samples' costs."""
    PACKED = "packed"
    """Algorithm 1 (LPT) on numbers of tokens."""
    PADDED = "padded"
    QUADRATIC = "quadratic"
    CONVOLUTION = "convolution"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PostBalance(Balancer):
    """Balancer of OrchMLLM's global orchestrator: each encoder by itself, the language model on whole interleaved sequences.

    With more than one microbatch, samples are first balanced over all (replica, microbatch) pairs of the language model; then
    each encoder shares the samples of a microbatch among its replicas. All components compute a sample in the same microbatch.

    Source: OrchMLLM §5.1, §6, Appendix A.
    """

    name: ClassVar[str] = "post-balance"

    algorithms: tuple[Algorithm, ...] = (Algorithm.SECONDS,)
    """Algorithms, one for each component, or a single one for all."""
    tolerance: float | None = None
    """Interval in tokens: the quadratic algorithm takes bins as equal if their sums of lengths share one; None: mean length."""

    @property
    def title(self) -> str:
        """Balancer name, with the algorithms that are not the default."""
        return "-".join((self.name, *(a for a in self.algorithms if a is not Algorithm.SECONDS)))

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign the samples of each component independently of the other components."""
        check_grid(costs, grid)
        algorithms = self._algorithms(costs)
        last = len(costs.components) - 1
        everywhere = np.zeros(costs.num_samples, dtype=np.int64)
        bucket = shared_by(
            everywhere, costs.takes_part[last], grid.num_buckets, self._of(costs, last, algorithms[last])
        )
        microbatch, replica = np.divmod(bucket, grid.num_replicas[-1])
        replicas = [
            shared_by(microbatch, costs.takes_part[row], grid.num_replicas[row], self._of(costs, row, algorithms[row]))
            for row in range(last)
        ]
        return assignment_of(costs, grid, [*replicas, replica], microbatch)

    def _algorithms(self, costs: SampleCosts) -> tuple[Algorithm, ...]:
        wanted = len(costs.components)
        if len(self.algorithms) not in (1, wanted):
            raise ConfigError(f"{len(self.algorithms)} algorithms for {wanted} components; give one, or one for each")
        if self.tolerance is not None and Algorithm.QUADRATIC not in self.algorithms:
            raise ConfigError(
                f"a tolerance with {', '.join(self.algorithms)}: only {Algorithm.QUADRATIC} reads it; leave it out"
            )
        return self.algorithms * (wanted if len(self.algorithms) == 1 else 1)

    def _of(self, costs: SampleCosts, row: int, algorithm: Algorithm) -> Callable[[np.ndarray, int], np.ndarray]:
        weights = costs.costs[row] if algorithm is Algorithm.SECONDS else costs.tokens(algorithm)[row]
        functions: dict[Algorithm, Callable[[np.ndarray, int], np.ndarray]] = {
            Algorithm.PADDED: padded,
            Algorithm.QUADRATIC: partial(quadratic, tolerance=self.tolerance),
            Algorithm.CONVOLUTION: convolution,
        }
        function = functions.get(algorithm, lpt)
        return lambda members, num_bins: function(weights[members], num_bins)
