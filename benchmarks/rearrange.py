"""Node-wise rearrangement: the batches are decided; which rank gets which is free. Keep what moves inside nodes.

Source: OrchMLLM §5.2.2, Algorithm 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_array, hstack

from mmcompile.batching.balance.integer_program import Limits
from mmcompile.errors import ConfigError

_REARRANGE_LIMITS = Limits(variables=256, nodes=200)
"""Batches times nodes: 32 ranks on 4 nodes, about a second at most. 128 ranks on 16 nodes (2,048) take a few seconds."""
_LEAST_GAIN = 1e-4
"""Reduction, relative to the largest volume, below which the integer program is not run again."""
_LARGEST_ASSIGNMENT = 1024
"""Ranks up to which the start is the assignment that keeps most in all, which takes cubic time."""
_SWAP_BUDGET = 1 << 17
"""Exchanges of the local search times ranks: looking for one takes time in proportion to ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rearrangement:
    """Rank of each batch."""

    rank: np.ndarray
    """int64 [batches]."""
    sent_before: int
    """Largest volume that a rank sends to other nodes if batch j goes to rank j."""
    sent: int
    """The same with this rearrangement."""
    exact: bool
    """Proved smallest by the integer program (to 1e-4 of the volume)."""


def rearrange(
    volume: np.ndarray, ranks_per_node: int, limits: Limits = _REARRANGE_LIMITS, swaps: int | None = None
) -> Rearrangement:
    """Batches to ranks so that the largest volume a rank sends to other nodes is smallest.

    Greedy and exchanges first; then the integer program, which must beat them, within limits beyond which theirs stands.

    Args:
        volume: int [ranks, batches]: what each rank holds of each batch; one batch a rank.
        ranks_per_node: consecutive ranks share a node.
        limits: of the integer program.
        swaps: most exchanges of the local search; up to 512, fewer with many ranks, if not given.

    Raises:
        ConfigError: the volume is not square, or ranks do not fill nodes.
    """
    count = len(volume)
    if volume.shape != (count, count) or not count or count % ranks_per_node:
        raise ConfigError(
            f"a volume {volume.shape} on nodes of {ranks_per_node} ranks; wanted as many batches as ranks, and whole nodes"
        )
    home = np.arange(count) // ranks_per_node
    before = _sent(volume, home, home)
    most = min(512, _SWAP_BUDGET // count) if swaps is None else swaps
    starts = (_swapped(volume, home, start, most) for start in (home.copy(), _greedy(volume, ranks_per_node)))
    node = min(starts, key=lambda start: int(_sent(volume, home, start).max()))
    better, exact = _exact(volume, home, int(_sent(volume, home, node).max()), limits)
    node = node if better is None else better
    return Rearrangement(
        rank=_ranks(volume, node, ranks_per_node),
        sent_before=int(before.max()),
        sent=int(_sent(volume, home, node).max()),
        exact=exact,
    )


def _sent(volume: np.ndarray, home: np.ndarray, node: np.ndarray) -> np.ndarray:
    """Return the volume that each rank sends to other nodes, int64 [ranks], if batch j is on node[j]."""
    kept = np.take_along_axis(_by_node(volume, node, int(home[-1]) + 1), home[:, None], axis=1)[:, 0]
    return volume.sum(axis=1) - kept


def _by_node(volume: np.ndarray, node: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the volume that each rank holds for each node, int64 [ranks, nodes]."""
    order = np.argsort(node, kind="stable")
    return np.add.reduceat(volume[:, order], np.searchsorted(node[order], np.arange(num_nodes)), axis=1)


def _greedy(volume: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """Node of each batch so that much stays on its node in all."""
    count = len(volume)
    kept = volume.reshape(-1, ranks_per_node, count).sum(axis=1)
    node = np.empty(count, dtype=np.int64)
    if count <= _LARGEST_ASSIGNMENT:
        slots, batches = linear_sum_assignment(np.repeat(kept, ranks_per_node, axis=0), maximize=True)
        node[batches] = slots // ranks_per_node
        return node
    free = np.full(len(kept), ranks_per_node)
    for batch in np.argsort(-kept.max(axis=0), kind="stable").tolist():
        choice = int(np.where(free > 0, kept[:, batch], -1).argmax())
        node[batch] = choice
        free[choice] -= 1
    return node


def _swapped(volume: np.ndarray, home: np.ndarray, node: np.ndarray, swaps: int) -> np.ndarray:
    """Exchange two batches between nodes as long as that lowers the rank that sends most."""
    sent = _sent(volume, home, node)
    for _ in range(swaps):
        worst = int(sent.argmax())
        here = home[worst]
        inside, outside = np.flatnonzero(node == here), np.flatnonzero(node != here)
        if not len(outside):
            break
        # Peak of this node [inside, outside] and of the other one, if batch `inside` goes and batch `outside` comes.
        mine = np.flatnonzero(home == here)
        after_here = (
            sent[mine][:, None, None]
            + volume[np.ix_(mine, inside)][:, :, None]
            - volume[np.ix_(mine, outside)][:, None]
        )
        others = np.searchsorted(home, node[outside])[:, None] + np.arange(len(mine))
        gone, come = volume[others, outside[:, None]], volume[others[:, :, None], inside]
        after_there = (sent[others] + gone)[:, :, None] - come
        peak = np.maximum(after_here.max(axis=0), after_there.max(axis=1).T)
        left, right = np.unravel_index(int(peak.argmin()), peak.shape)
        if peak[left, right] >= sent[worst]:
            break
        node[inside[left]], node[outside[right]] = node[outside[right]], here
        sent = _sent_again(volume, home, node, sent, (inside[left], outside[right]))
    return node


def _sent_again(
    volume: np.ndarray, home: np.ndarray, node: np.ndarray, sent: np.ndarray, moved: tuple[np.int64, np.int64]
) -> np.ndarray:
    """`_sent` after two batches have changed places."""
    for came, went in (moved, moved[::-1]):
        ranks = home == node[came]
        sent = sent - np.where(ranks, volume[:, came] - volume[:, went], 0)
    return sent


def _exact(volume: np.ndarray, home: np.ndarray, upper: int, limits: Limits) -> tuple[np.ndarray | None, bool]:
    """Node of each batch with a smaller largest volume than is known, or None; and whether what is known now is smallest."""
    count, num_nodes = len(volume), int(home[-1]) + 1
    if count * num_nodes > limits.variables or upper == 0:
        return None, upper == 0
    variables = count * num_nodes  # x[batch, node]
    batch, node = np.divmod(np.arange(variables), num_nodes)
    ones = np.ones(variables)
    once = coo_array((ones, (batch, np.arange(variables))), shape=(count, variables + 1))
    full = coo_array((ones, (node, np.arange(variables))), shape=(num_nodes, variables + 1))
    rank, held = np.nonzero(volume)
    kept = coo_array((volume[rank, held], (rank, held * num_nodes + home[rank])), shape=(count, variables))
    limit = np.ones(variables + 1)
    limit[-1] = upper * (1 - _LEAST_GAIN)
    result = milp(
        c=np.append(np.zeros(variables), 1.0),
        integrality=np.append(np.ones(variables), 0.0),
        bounds=Bounds(np.zeros(variables + 1), limit),  # pyright: ignore[reportArgumentType]  (guessed from its defaults)
        constraints=[
            LinearConstraint(once.tocsr(), 1, 1),
            LinearConstraint(full.tocsr(), count // num_nodes, count // num_nodes),
            LinearConstraint(hstack([kept, np.ones((count, 1))]).tocsr(), volume.sum(axis=1), np.inf),
        ],
        options={"time_limit": limits.time_s, "node_limit": limits.nodes, "mip_rel_gap": _LEAST_GAIN},
    )
    if result.status == 2:  # infeasible: nothing is smaller
        return None, True
    if result.status != 0:
        return None, False
    return result.x[:-1].reshape(count, num_nodes).argmax(axis=1), True


def _ranks(volume: np.ndarray, node: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """Rank of each batch: on its node, where most of it stays on the rank that holds it."""
    rank = np.empty(len(node), dtype=np.int64)
    for first in range(0, len(node), ranks_per_node):
        batches = np.flatnonzero(node == first // ranks_per_node)
        rows, columns = linear_sum_assignment(volume[first : first + ranks_per_node, batches], maximize=True)
        rank[batches[columns]] = first + rows
    return rank
