"""Ranks on which the stages of a plan are placed, and the seconds of a message between two stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain as chained

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import collective_s, p2p_seconds
from mmcompile.costmodel.hardware import Interconnect
from mmcompile.planner.pricing.priced_chain import PricedChain
from mmcompile.planner.search.settings import Degrees

Sent = Sequence[tuple[int, int]]
"""Layer outputs that one message carries, each as (chain index, layer index)."""
End = tuple[int, Sequence[int]]
"""One end of a message: (chain index, ranks of the stage)."""


def place(degrees: Sequence[Degrees], counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of every stage, chain by chain; no two stages share a rank.

    Each chain has consecutive ranks, the chain of the largest tp first, so that no tensor-parallel group crosses nodes. In a
    chain they go replica by replica, in a replica stage by stage, so that neighbours in the pipeline are near.
    """
    base: dict[int, int] = {}
    free = 0
    for chain in sorted(range(len(degrees)), key=lambda index: -degrees[index].tp):
        base[chain] = free
        free += degrees[chain].ranks * counts[chain]
    found: list[tuple[int, ...]] = []
    for chain, (own, count) in enumerate(zip(degrees, counts, strict=True)):
        for position in range(count):
            first = base[chain] + position * own.width
            starts = range(first, first + count * own.ranks, count * own.width)
            found.append(tuple(chained(*(range(start, start + own.width) for start in starts))))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMessages:
    """Calculator of the bytes and seconds of messages between stages of priced chains."""

    cluster: Cluster
    degrees: Sequence[Degrees]
    """Parallel degrees of each chain."""
    priced: Sequence[PricedChain]

    def num_bytes(self, target: int, sent: Sent) -> int:
        """Return the bytes of one microbatch's forward message to one replica of the chain with index `target`."""
        replicas = self.degrees[target].dp
        return sum(
            int(self.priced[chain].whole_bytes[layer]) * self.degrees[chain].dp // replicas for chain, layer in sent
        )

    def seconds(self, source: End, target: End, sent: Sent) -> float:
        """Return the seconds of one message: every rank sends its share to its peer, at once.

        If sender and receiver have different numbers of ranks, the one with fewer ranks sets the time. A receiver with tensor
        parallelism then gathers the shares of its group, as each rank reads the whole tensor.
        """
        sends, receives = self.degrees[source[0]], self.degrees[target[0]]
        link = self._link(source[1], target[1])
        if (sends.tp, sends.cp, sends.dp) == (receives.tp, receives.cp, receives.dp):
            return p2p_seconds(sum(int(self.priced[chain].output_bytes[layer]) for chain, layer in sent), link)
        arriving = self.num_bytes(target[0], sent)
        sent_s = p2p_seconds(arriving * receives.dp / min(sends.ranks, receives.ranks), link)
        gathered_s = (
            collective_s("all_gather", arriving / receives.cp, receives.tp, self.cluster) if receives.tp > 1 else 0.0
        )
        return sent_s + gathered_s

    def _link(self, source: Sequence[int], target: Sequence[int]) -> Interconnect:
        # The other replicas are placed in the same way, so the ranks of the first replicas suffice.
        node = self.cluster.devices_per_node
        if len(source) == len(target):
            pairs = zip(source[: node * node], target[: node * node], strict=True)
            near = all(a // node == b // node for a, b in pairs)
        else:
            ends = (source[0], source[-1], target[0], target[-1])
            near = min(ends) // node == max(ends) // node
        return self.cluster.intra if near else self.cluster.inter
