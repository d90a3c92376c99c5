"""Time of communication: latency plus bytes over bandwidth (the alpha-beta model)."""

from __future__ import annotations

from mmcompile.costmodel.cluster import Interconnect


def p2p_seconds(num_bytes: int, link: Interconnect) -> float:
    """Seconds until a message sent over an idle link has arrived; 0 for an empty message, which is never sent."""
    if num_bytes == 0:
        return 0.0
    return link.latency_s + num_bytes / link.bytes_per_s
