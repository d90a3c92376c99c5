"""The splitting problem with demands, as values: chains, what is demanded of them, and what a split costs, by definition.

Stages of a chain are counted from its end (1 is the last): the distance to the loss sets the microbatches in flight.
The stage that is k-th from the end, layers i to j-1, takes the picoseconds of `times` and needs

    bytes(i, j) = fixed(i..j) + in_flight(tail + k - 1) * saved(i..j) + the most that one layer of it works with
                  + earlier layers' values that a stage beginning with layer i holds

where `tail` is the number of stages between the chain's end and the loss. If a chain feeds layer l of another, its tail is the
other's tail plus the other's stages from the one with layer l to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcompile.planner.exact.rules import Cap, Count, Cuts, Demand, Devices, InStage, Rule
from mmcompile.planner.pricing.chains import ChainEdge, ChainLayer
from mmcompile.planner.search.partition import Split, StageTables


@dataclass(frozen=True, kw_only=True)
class ExactChain:
    """Chain of layers to split, with the stage counts that it may have; its parallel degrees are decided."""

    name: str
    labels: tuple[ChainLayer, ...]
    tables: StageTables
    """Time and memory of every stage that the layers could make."""
    tp: int = 1
    devices: int = 1
    """Number of devices of one stage: tp * cp * dp."""
    low: int
    """Smallest allowed number of stages."""
    high: int
    """Largest allowed number of stages."""
    feeds: tuple[ChainEdge, ...] = ()
    """Edges to later chains; empty for the chain that ends in the loss."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """Ranks of each stage, first to last, if the number of stages is decided (`low == high`); else empty.

    Stages that share ranks run in turn.
    """

    def __post_init__(self) -> None:
        assert not self.ranks or self.low == self.high == len(self.ranks), (
            "ranks are those of a decided number of stages"
        )

    @property
    def num_layers(self) -> int:
        """Number of layers of the chain."""
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class ExactProblem:
    """Input of the exact solver: chains in topological order (the last ends in the loss), and the constraints on their split."""

    chains: tuple[ExactChain, ...]
    in_flight: Callable[[int], int]
    """Function from a stage's depth (stages to the loss, 0 for the loss stage) to its microbatches in flight; it never falls."""
    demands: tuple[Demand, ...] = ()


Splits = tuple[Split, ...]
"""One split for each chain of a problem."""


def tails(problem: ExactProblem, splits: Splits) -> list[int]:
    """Return the number of stages between each chain's end and the loss."""
    found = [0] * len(splits)
    for index in reversed(range(len(splits))):
        for feed in problem.chains[index].feeds:
            target = splits[feed.target]
            below = sum(end > feed.target_layer for end in target.boundaries[1:])
            found[index] = max(found[index], found[feed.target] + below)
    return found


def stage_bytes(problem: ExactProblem, splits: Splits) -> list[list[int]]:
    """Return the peak bytes of every stage: entry [c][s] is stage s of chain c, counted from its first."""
    used: list[list[int]] = []
    for chain, split, tail in zip(problem.chains, splits, tails(problem, splits), strict=True):
        depths = reversed(range(tail, tail + split.num_stages))
        needs = (chain.tables.needs(problem.in_flight(depth)) for depth in depths)
        used.append([int(table[ends]) for table, ends in zip(needs, split.ranges, strict=True)])
    return used


def stage_times(problem: ExactProblem, splits: Splits) -> list[list[int]]:
    """Return the picoseconds of every stage for one microbatch: entry [c][s] is stage s of chain c, counted from its first."""
    return [
        [int(chain.tables.times[ends]) for ends in split.ranges]
        for chain, split in zip(problem.chains, splits, strict=True)
    ]


def sharing(problem: ExactProblem) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return groups of (chain, stage) that run on the same ranks, two or more each. Rank sets must be equal or disjoint."""
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for index, chain in enumerate(problem.chains):
        for stage, ranks in enumerate(chain.ranks):
            groups.setdefault(ranks, []).append((index, stage))
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def slowest_ps(problem: ExactProblem, splits: Splits) -> int:
    """Return the picoseconds of the slowest stage; stages that share ranks count with their sum."""
    times = stage_times(problem, splits)
    shared = (sum(times[chain][stage] for chain, stage in group) for group in sharing(problem))
    return max([max(map(max, times)), *shared])


def broken(problem: ExactProblem, splits: Splits) -> tuple[Demand, ...]:
    """Return the demands that given splits do not meet."""
    return tuple(demand for demand in problem.demands if not _holds(problem, splits, demand.rule))


def _holds(problem: ExactProblem, splits: Splits, rule: Rule) -> bool:
    match rule:
        case Cuts():
            return rule.some == any(rule.first < cut <= rule.last for cut in splits[rule.chain].boundaries[1:-1])
        case InStage():
            ranges = splits[rule.chain].ranges
            first, last = ranges[rule.stage] if rule.stage < len(ranges) else (0, 0)
            return first <= rule.first and rule.last <= last
        case Cap():
            return all(used <= rule.num_bytes for used in _capped(problem, splits, rule))
        case Count():
            return rule.low <= splits[rule.chain].num_stages <= rule.high
        case Devices():
            pairs = zip(problem.chains, splits, strict=True)
            return sum(chain.devices * split.num_stages for chain, split in pairs) <= rule.most
    return False


def _capped(problem: ExactProblem, splits: Splits, rule: Cap) -> Sequence[int]:
    """Return the bytes that a memory cap limits: those of each stage concerned, then sums of such stages that share ranks."""
    used = stage_bytes(problem, splits)
    chosen = [(c, s) for c, stages in enumerate(used) for s in range(len(stages)) if covers(rule, c, s)]
    shared = [group for group in sharing(problem) if any(stage in chosen for stage in group)]
    return [used[c][s] for c, s in chosen] + [sum(used[c][s] for c, s in group) for group in shared]


def covers(rule: Cap, chain: int, stage: int) -> bool:
    """Return whether a cap applies to a stage, counted from 0."""
    return rule.chain in (None, chain) and rule.stage in (None, stage)
