"""`towers`: balance groups of a plan, which are sets of chains whose samples are balanced over microbatches as one.

A microbatch belongs to one balance group. Values between chains of the same group keep their assignment of samples to
microbatches; values for the language model's group are exchanged sample by sample (`mmcompile.batching.step_plan.RowExchange`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.errors import PlanError
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain


def towers(plan: Plan) -> dict[str, tuple[Chain, ...]]:
    """Return the chains by balance group, in the order of the plan; the language model's group is last.

    The language model's group is the last chain with every chain that it feeds, directly or not; any other group is a set of
    chains joined by links. A group is named after its first chain.

    Raises:
        PlanError: chains of one balance group have different numbers of replicas.
    """
    pairs = plan.chain_edges
    last = _reached(plan.chains[-1].name, pairs)
    others = [pair for pair in pairs if last.isdisjoint(pair)]
    joined = [*others, *((target, source) for source, target in others)]
    found: dict[str, tuple[Chain, ...]] = {}
    placed = set(last)
    for chain in plan.chains:
        if chain.name not in placed:
            members = _reached(chain.name, joined)
            placed |= members
            found[chain.name] = _members(plan, members)
    final = _members(plan, last)
    return {**found, final[0].name: final}


def _reached(start: str, pairs: Sequence[tuple[str, str]]) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        name = waiting.pop()
        new = {target for source, target in pairs if source == name} - found
        found |= new
        waiting += new
    return found


def _members(plan: Plan, names: set[str]) -> tuple[Chain, ...]:
    members = tuple(chain for chain in plan.chains if chain.name in names)
    if len({chain.dp for chain in members}) > 1:
        counts = ", ".join(f"{chain.name} has {chain.dp}" for chain in members)
        raise PlanError(
            f"chains that feed each other need equally many replicas, since the same microbatches pass through them: {counts}; "
            f"plan with the same replicas for {', '.join(chain.name for chain in members)}"
        )
    return members
