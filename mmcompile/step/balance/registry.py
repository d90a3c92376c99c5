"""Balancers by name."""

from __future__ import annotations

from collections.abc import Mapping

from mmcompile.errors import ConfigError
from mmcompile.step.balance.auto import Auto
from mmcompile.step.balance.balancer import Balancer
from mmcompile.step.balance.baselines import Arrival, DistTrain, SortedRoundRobin
from mmcompile.step.balance.buckets import Joint
from mmcompile.step.balance.hierarchical import Defer, Hierarchical
from mmcompile.step.balance.node_local import NodeLocal
from mmcompile.step.balance.post_balance import Algorithm, PostBalance

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
"""Name -> balancer with default options."""


def balancer(name: str) -> Balancer:
    """The balancer of a name, with default options. Raises ConfigError with the names there are."""
    if name not in BALANCERS:
        raise ConfigError(f"no balancer {name!r}; there are {', '.join(BALANCERS)}")
    return BALANCERS[name]
