"""`attribute`: why the ranks of each chain are idle, by taking the causes away one after another.

The step is simulated as it is, and then again

    1. with links that take no time,
    2. and with equal microbatches: each takes part in everything that any takes part in, for its mean time,
    3. and with equal stages: every rank has the mean work of all ranks.

What is idle after 3 is the warm-up (filling and draining: (S - 1) / (M + S - 1) in a chain of S stages); what a step takes
away is the share of the cause that it removes: links, microbatches, stages. Work only moves, the sum over all ranks stays.

Rule: idle time never grows on the way. Where a step would add to it (a chain that is itself the slowest is *less* idle than
it would be among equals) that step gets nothing, and what remains for the next is what there was before. So no share is
negative, and the shares of a chain add up to its bubble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmcompile.config import ScheduleKind
from mmcompile.planner.plan.plan_record import BubbleShare
from mmcompile.planner.schedule.equalize import Case, equal_microbatches, equal_stages
from mmcompile.planner.schedule.schedule import Flow, Placed, build_schedule
from mmcompile.planner.schedule.simulate import Durations, simulate


def attribute(
    stages: Sequence[Placed],
    flows: Sequence[Flow],
    durations: Durations,
    link_s: Mapping[tuple[str, str], float] | None = None,
    *,
    chains: Mapping[str, Sequence[str]],
    kind: ScheduleKind = "1f1b",
) -> tuple[BubbleShare, ...]:
    """Idle share of the ranks of each chain, by cause (see the module's docstring).

    Args:
        stages: as in `build_schedule`, with its flows, and kind.
        durations: as in `simulate`, with its link_s.
        chains: chain name -> names of its stages. Ranks that run stages of several chains count in each.

    Returns:
        One a chain, in the order of `chains`; all zero for a step that takes no time.
    """
    case = Case(stages=stages, flows=flows, durations=durations, kind=kind)
    steady = equal_microbatches(case)
    actual = _Idle.of(case, link_s or {})
    ladder = [actual, _Idle.of(case, {}), _Idle.of(steady, {}), _Idle.of(equal_stages(steady), {})]
    rank = {stage.name: stage.ranks[0] for stage in stages}
    return tuple(
        _share(chain, sorted({rank[name] for name in names}), ladder, actual.makespan_s)
        for chain, names in chains.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Idle:
    """A simulated step, as far as idleness goes."""

    makespan_s: float
    idle_s: tuple[float, ...]
    """Of each rank."""

    @classmethod
    def of(cls, case: Case, link_s: Mapping[tuple[str, str], float]) -> _Idle:
        schedule = build_schedule(case.stages, case.flows, case.kind)
        timeline = simulate(schedule, case.durations, link_s, record=False)
        return cls(
            makespan_s=timeline.makespan_s,
            idle_s=tuple(timeline.makespan_s - busy_s for busy_s in timeline.busy_s),
        )


def _share(chain: str, ranks: Sequence[int], ladder: Sequence[_Idle], makespan_s: float) -> BubbleShare:
    if not makespan_s or not ranks:
        return BubbleShare(chain=chain, warm_up=0.0, stages=0.0, microbatches=0.0, links=0.0)
    left: list[float] = []
    for idle in ladder:
        share = sum(idle.idle_s[rank] for rank in ranks) / (len(ranks) * makespan_s)
        left.append(max(0.0, min([share, *left[-1:]])))
    links, microbatches, stages = (before - after for before, after in pairwise(left))
    return BubbleShare(chain=chain, warm_up=left[-1], stages=stages, microbatches=microbatches, links=links)
