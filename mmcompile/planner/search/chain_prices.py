"""`ChainPrices`: prices of chains in any layout, at the loads of a workload, each computed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmcompile.costmodel.comm import all_reduce_s
from mmcompile.costmodel.load import Load
from mmcompile.ir.graph import ModelGraph
from mmcompile.planner.pricing.chains import ChainSpec
from mmcompile.planner.pricing.priced_chain import Loads, PricedChain, price_chain
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.settings import Degrees, Setting

NUM_DRAWS = 4
"""Number of steps of random samples over which an expected makespan is the mean."""
_SEED = 0

_PriceKey = tuple[ChainSpec, LayerSharding, float, tuple[int, ...]]
"""Chain, sharding of its layers, samples of a slot, and (microbatches, replicas) where loads depend on them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainPrices:
    """Prices of a model's chains on one cluster. Problems that differ in their choices share one."""

    graph: ModelGraph
    pricing: Pricing
    workload: Workload | None = None
    """Loads of samples; None: every sample is like those of the captured batch."""
    _priced: dict[_PriceKey, PricedChain] = field(init=False, default_factory=dict, repr=False)
    _means: dict[float, Mapping[str, Load]] = field(init=False, default_factory=dict, repr=False)
    _worst: dict[float, Mapping[str, Load]] = field(init=False, default_factory=dict, repr=False)
    _spread: dict[tuple[float, ...], float] = field(init=False, default_factory=dict, repr=False)
    _reduced: dict[tuple[int, Degrees], float] = field(init=False, default_factory=dict, repr=False)
    _drawn: dict[tuple[float, ...], Mapping[str, NDArray[np.float64]]] = field(
        init=False, default_factory=dict, repr=False
    )

    @property
    def loss_component(self) -> str:
        """Component that ends in the loss."""
        return self.graph.loss_component

    def mean_load(self, component: str, setting: Setting, degrees: Degrees, *, last: bool) -> Load | None:
        """Return the mean load of a slot of a replica; None where costs are known at one load only.

        Args:
            last: of the chain that ends in the loss, the replica with the most tokens (as `drawn_loads`); of others any.
        """
        samples = setting.samples_of(degrees)
        if self.workload is None:
            return self._like_captured(component, samples)
        if last and self.workload.stats is not None:
            tokens, squares = self.drawn_loads(setting, degrees, last=True)[component].mean(axis=(0, 1)).tolist()
            return Load(tokens=tokens, squares=squares)
        size = max(samples, 1.0)
        if size not in self._means:
            self._means[size] = self.workload.mean(size)
        return self._means[size][component] * (samples / size)

    def worst_load(self, component: str, samples: float) -> Load | None:
        """Load of the heaviest microbatch of so many samples, at least one."""
        if self.workload is None:
            return self._like_captured(component, samples)
        size = max(samples, 1.0)
        if size not in self._worst:
            self._worst[size] = self.workload.worst(size).loads
        return self._worst[size][component]

    def _like_captured(self, component: str, samples: float) -> Load | None:
        if component not in self.pricing.table.loads:
            return None
        load = self.pricing.table.loads[component]
        return load if samples == self.graph.num_samples else load * (samples / self.graph.num_samples)

    def drawn_loads(self, setting: Setting, degrees: Degrees, *, last: bool) -> Mapping[str, NDArray[np.float64]]:
        """Return component -> tokens and squares of a replica of a chain in random steps, [draws, microbatches, 2].

        Samples are taken as they come. A step lasts as long as its slowest replica, so of the last chain's it is the one with the
        most tokens; the replicas of other chains share the samples of a slot evenly. Empty without a dataset, where all
        microbatches are alike.

        Args:
            last: the chain ends in the loss.
        """
        if self.workload is None or self.workload.stats is None:
            return {}
        key = (setting.num_microbatches, setting.samples, setting.dp, 0 if last else degrees.dp)
        if key not in self._drawn:
            steps = [self._step(setting, draw) for draw in range(NUM_DRAWS)]
            heaviest = [int(step[self.loss_component][..., 0].sum(axis=0).argmax()) for step in steps]
            self._drawn[key] = {
                name: np.stack(
                    [
                        step[name][:, slowest] if last else step[name].sum(axis=1) / degrees.dp
                        for step, slowest in zip(steps, heaviest, strict=True)
                    ]
                )
                for name in steps[0]
            }
        return self._drawn[key]

    def spread(self, setting: Setting) -> float:
        """Return the coefficient of variation of the last chain's microbatches: standard deviation over mean of their tokens."""
        key = (setting.num_microbatches, setting.samples, setting.dp)
        if key not in self._spread:
            loads = self.drawn_loads(setting, Degrees(dp=setting.dp), last=True)
            self._spread[key] = 0.0
            if loads:
                tokens = loads[self.loss_component][..., 0]
                mean = np.maximum(tokens.mean(axis=1), 1e-9)
                self._spread[key] = float((tokens.std(axis=1) / mean).mean())
        return self._spread[key]

    def all_reduce_s(self, num_bytes: int, degrees: Degrees) -> float:
        """Return the seconds in which all ranks that hold the same parameters sum so many bytes of gradients."""
        key = (num_bytes, degrees)
        if key not in self._reduced:
            peers = degrees.cp * degrees.dp
            together = self.pricing.cluster.together(peers, degrees.tp)
            self._reduced[key] = all_reduce_s(num_bytes, peers, self.pricing.cluster, ranks_in_a_node=together)
        return self._reduced[key]

    def _step(self, setting: Setting, draw: int) -> Mapping[str, NDArray[np.float64]]:
        """Return component -> [microbatches, replicas of the last chain, 2]."""
        key = (setting.num_microbatches, setting.samples, setting.dp, -1.0 - draw)
        if key not in self._drawn:
            assert self.workload is not None
            count = setting.num_microbatches * setting.dp
            loads = self.workload.draw(count, setting.samples, seed=_SEED + draw)
            self._drawn[key] = {
                name: np.stack([rows, loads.squares[name]], axis=-1).reshape(setting.num_microbatches, setting.dp, 2)
                for name, rows in loads.tokens.items()
            }
        return self._drawn[key]

    def priced(self, chain: ChainSpec, degrees: Degrees, setting: Setting) -> PricedChain:
        """Return the prices of a chain's layers, for one replica of it. Computed once for each load and sharding."""
        key = self._key(chain, degrees, setting)
        if key not in self._priced:
            self.price(chain, [(degrees, setting)])
        return self._priced[key]

    def price(self, chain: ChainSpec, ways: Iterable[tuple[Degrees, Setting]]) -> None:
        """Price many chains at once, which is several times faster than one by one."""
        new: dict[LayerSharding, dict[_PriceKey, tuple[Degrees, Setting]]] = {}
        for degrees, setting in ways:
            key = self._key(chain, degrees, setting)
            if key not in self._priced:
                new.setdefault(degrees.sharding(setting.recompute), {}).setdefault(key, (degrees, setting))
        for sharding, missing in new.items():
            loads = [self.loads_of(chain, degrees, setting) for degrees, setting in missing.values()]
            for key, priced in zip(missing, price_chain(self.pricing, chain, sharding, loads), strict=True):
                self._priced[key] = priced

    def loads_of(self, chain: ChainSpec, degrees: Degrees, setting: Setting) -> Loads:
        """Return the mean and worst load of each component of a chain."""
        last = self.loss_component in chain.components
        return {
            name: (
                self.mean_load(name, setting, degrees, last=last),
                self.worst_load(name, setting.samples_of(degrees)),
            )
            for name in chain.components
        }

    def _key(self, chain: ChainSpec, degrees: Degrees, setting: Setting) -> _PriceKey:
        drawn = self.workload is not None and self.workload.stats is not None
        loads = (setting.num_microbatches, setting.dp) if drawn and self.loss_component in chain.components else ()
        return chain, degrees.sharding(setting.recompute), setting.samples_of(degrees), loads
