"""Who proposes candidates, by name: our search, published searches, baselines. The simulator judges them all."""

from __future__ import annotations

from collections.abc import Mapping

from mmcompile.errors import ConfigError
from mmcompile.planner.search.candidate import Strategy
from mmcompile.planner.strategies.baselines import BASELINES
from mmcompile.planner.strategies.dflop import dflop
from mmcompile.planner.strategies.entrain import entrain
from mmcompile.planner.strategies.loosely_coupled import loosely_coupled

AUTO = "auto"
"""Our search; its candidates and those of all others."""

STRATEGIES: Mapping[str, Strategy] = {
    "loosely-coupled": loosely_coupled,
    "dflop": dflop,
    "entrain": entrain,
    **BASELINES,
}
"""Name -> strategy; `auto` is not among them, for it includes them."""


def strategy_of(name: str) -> Strategy:
    """A strategy by name. Raises ConfigError with the names there are."""
    if name not in STRATEGIES:
        raise ConfigError(f"no strategy {name!r}; choose one of {', '.join((AUTO, *STRATEGIES))}")
    return STRATEGIES[name]
