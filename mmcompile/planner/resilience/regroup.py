"""Published rules for the nodes that are left: use a smaller template, borrow a node, merge pipelines (Oobleck, §2.5.1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic

from mmcompile.planner.resilience.composition import compositions
from mmcompile.planner.resilience.job import Node


class RegroupRule(StrEnum):
    """Rule by which the next pipelines follow from those that ran."""

    START = "start"
    REINSTANTIATE = "reinstantiate"
    BORROW = "borrow"
    MERGE = "merge"
    RECOMPOSE = "recompose"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroups(Generic[Node]):
    """Assignment of nodes to pipelines, and the nodes left over."""

    groups: tuple[tuple[Node, ...], ...]
    """Nodes of each pipeline; from `bind`, they are in the order of the template's nodes."""
    spares: tuple[Node, ...]
    rule: RegroupRule = RegroupRule.RECOMPOSE
    """Rule that made the groups; if several were applied, the one listed last in `RegroupRule`: MERGE after BORROW."""
    kept_bytes: int = 0
    """Bytes of layers that already are on their node, counted by `bind`."""


def regroup(
    groups: Sequence[Sequence[Node]], lost: Collection[Node], sizes: Sequence[int], spares: Sequence[Node] = ()
) -> NodeGroups[Node] | None:
    """Return the nodes that are left as groups, one for each pipeline, by the published rules; None if too few for a pipeline.

    The result has small groups first. A pipeline below the smallest template's size takes spare nodes, then the last node of the
    largest pipeline above that size (the last of equals). Pipelines that are still too small are joined until they are large
    enough; a remainder joins the first group that is large enough. A joined group large enough for several pipelines is divided
    again. A group without a template of its size gives up surplus nodes.

    Args:
        groups: nodes of each pipeline that ran.
        sizes: node counts of the templates, ascending.
        spares: idle nodes that are alive.
    """
    minimum = sizes[0]
    alive = [[node for node in group if node not in lost] for group in groups]
    alive = [group for group in alive if group]
    idle = [node for node in spares if node not in lost]
    rule = RegroupRule.REINSTANTIATE
    for group in alive:
        while len(group) < minimum and (giver := _giver(alive, idle, minimum)) is not None:
            group.append(giver.pop(0) if giver is idle else giver.pop())
            rule = RegroupRule.BORROW
    joined: list[list[Node]] = []
    if any(len(group) < minimum for group in alive):
        rule = RegroupRule.MERGE
        merged = _merge(alive, minimum)
        if merged is None:
            return None
        alive, joined = merged
    kept: list[list[Node]] = []
    for group in alive:
        parts, left = _divide(group, sizes, whole=group not in joined)
        kept += parts
        idle += left
    kept.sort(key=lambda group: (len(group), group[0]))
    return NodeGroups(groups=tuple(map(tuple, kept)), spares=tuple(idle), rule=rule)


def _giver(groups: Sequence[list[Node]], idle: list[Node], minimum: int) -> list[Node] | None:
    if idle:
        return idle
    able = [group for group in groups if len(group) > minimum]
    largest = max(map(len, able), default=0)
    return next((group for group in reversed(able) if len(group) == largest), None)


def _merge(groups: Sequence[list[Node]], minimum: int) -> tuple[list[list[Node]], list[list[Node]]] | None:
    """Join groups of fewer than `minimum` nodes; return (all groups, joined groups), None if all nodes together are too few."""
    whole = [group for group in groups if len(group) >= minimum]
    joined: list[list[Node]] = []
    open_group: list[Node] = []
    for group in groups:
        if len(group) < minimum:
            open_group = open_group + group
            if len(open_group) >= minimum:
                joined.append(open_group)
                open_group = []
    if open_group:
        if not whole and not joined:
            return None
        taker = (whole or joined).pop(0)
        joined.append(open_group + taker)
    return whole + joined, joined


def _divide(group: list[Node], sizes: Sequence[int], *, whole: bool) -> tuple[list[list[Node]], list[Node]]:
    """Divide a group of nodes into pipelines of the template sizes; return (pipelines, surplus nodes).

    With `whole`, a group with the size of a template becomes one pipeline. Else as many of its nodes as possible are used, by as
    many pipelines as possible.
    """
    if whole and len(group) in sizes:
        return [group], []
    for used in range(len(group), sizes[0] - 1, -1):
        found = list(compositions(sizes, used))
        if found:
            counts = max(found, key=lambda counts: (sum(counts), counts))
            parts, start = [], 0
            for size, count in zip(sizes, counts, strict=True):
                for _ in range(count):
                    parts.append(group[start : start + size])
                    start += size
            return parts, group[start:]
    raise AssertionError(f"a group of {len(group)} nodes is smaller than the smallest template")
