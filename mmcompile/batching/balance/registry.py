"""Balancers by name."""

from __future__ import annotations

from collections.abc import Mapping

from mmcompile.batching.balance.arrival_order import Arrival, DistTrain, SortedRoundRobin
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.buckets import Joint
from mmcompile.batching.balance.hierarchical import Defer, Hierarchical
from mmcompile.batching.balance.node_local import NodeLocal
from mmcompile.batching.balance.post_balance import Algorithm, PostBalance
from mmcompile.errors import ConfigError

_ALL: tuple[Balancer, ...] = (
    Arrival(),
    SortedRoundRobin(),
    DistTrain(),
    Joint(),
    Hierarchical(),
    Hierarchical(defer=Defer.ALL),
    PostBalance(),
    *(PostBalance(algorithms=(algorithm,)) for algorithm in Algorithm if algorithm is not Algorithm.SECONDS),
    NodeLocal(),
    Auto(),
)
BALANCERS: Mapping[str, Balancer] = {one.title: one for one in _ALL}
"""Balancer name -> balancer with default options."""


def balancer(name: str) -> Balancer:
    """Return the balancer `name` with default options. Raises ConfigError with the known names."""
    if name not in BALANCERS:
        raise ConfigError(f"no balancer {name!r}; there are {', '.join(BALANCERS)}")
    return BALANCERS[name]
