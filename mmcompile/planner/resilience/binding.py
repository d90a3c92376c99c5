"""Which node plays which part of which pipeline, so that most state stays where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from mmcompile.planner.resilience.job import Job

Holdings = Mapping[int, np.ndarray]
"""Node -> which layers it holds with their optimizer state, bool [layers of the job]; a node that is absent holds none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """Nodes of each pipeline, in the order of its template's nodes."""

    pipelines: tuple[tuple[int, ...], ...]
    spares: tuple[int, ...]
    kept_bytes: int
    """Of layers that their new node holds already."""


def bind(job: Job, sizes: Sequence[int], nodes: Sequence[int], holdings: Holdings) -> Binding:
    """Give every part of every pipeline a node, keeping most bytes in place: an exact assignment.

    Args:
        job: the templates and sizes of layers.
        sizes: nodes of each pipeline; their sum is at most the number of nodes.
        nodes: to choose from.
        holdings: what they hold.
    """
    held = np.array([holdings.get(node, np.zeros(len(job.layers), dtype=bool)) for node in nodes], dtype=np.float64)
    needed = np.concatenate([job.needs(job.by_size[size]) for size in sizes])
    kept = held @ (needed * job.bytes_of).T
    rows, parts = linear_sum_assignment(kept, maximize=True)
    player = {int(part): nodes[row] for row, part in zip(rows, parts, strict=True)}
    ends = np.cumsum(sizes).tolist()
    chosen = set(player.values())
    return Binding(
        pipelines=tuple(
            tuple(player[part] for part in range(end - size, end)) for size, end in zip(sizes, ends, strict=True)
        ),
        spares=tuple(node for node in nodes if node not in chosen),
        kept_bytes=round(float(kept[rows, parts].sum())),
    )
