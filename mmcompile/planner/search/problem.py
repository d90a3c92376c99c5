"""`Problem`: everything that a strategy reads; and `ChainPrices`: seconds and bytes of chains in any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import collective_s
from mmcompile.costmodel.load import Load
from mmcompile.ir.graph import ModelGraph
from mmcompile.planner.plan.plan_record import Fingerprint
from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.pricing.priced_chain import Loads, PricedChain, price_chain
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.settings import Degrees, SearchSpace, Setting

Decided = tuple[int | None, ...]
"""Number of replicas of each chain that the request fixes; None for a chain where the search chooses."""


def balance_groups_of(chains: ChainSet) -> tuple[tuple[int, ...], ...]:
    """Return groups of chain indices that must have equally many replicas: the last chain alone, the others joined by edges."""
    last = len(chains.chains) - 1
    graph = nx.Graph()
    graph.add_nodes_from(range(last))
    graph.add_edges_from((edge.source, edge.target) for edge in chains.edges if last not in (edge.source, edge.target))
    return (*sorted(tuple(sorted(group)) for group in nx.connected_components(graph)), (last,))


def decided_replicas(chains: ChainSet, wanted: Mapping[str, int], *, follow: bool) -> Decided | None:
    """Return the number of replicas that a request fixes for each chain; None if chains that must be equal get two numbers.

    Args:
        wanted: chain or component name -> replicas.
        follow: True to give chains without a number that of the last chain, or 1 if that has none; False to give them None, so
            that the search tries all.
    """
    found: list[int | None] = [None] * len(chains.chains)
    for group in balance_groups_of(chains):
        names = {name for index in group for name in chains.chains[index].names}
        numbers = {number for name, number in wanted.items() if name in names}
        if len(numbers) > 1:
            return None
        for index in group:
            found[index] = next(iter(numbers), None)
    if not follow:
        return tuple(found)
    rest = found[-1] or 1
    return tuple(number or rest for number in found)


NUM_DRAWS = 4
"""Number of simulated steps of random samples; an expected makespan is their mean."""
_SEED = 0

# Key of cached prices: (chain, sharding of its layers, samples of a microbatch, drawn). `drawn` is (microbatches, replicas), or
# () if loads do not depend on them.
_PriceKey = tuple[ChainSpec, LayerSharding, float, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainPrices:
    """Prices of a model's chains on one cluster. Problems that differ only in their choices share one object."""

    graph: ModelGraph
    pricing: Pricing
    workload: Workload | None = None
    """Loads of the dataset's samples; None: every sample is like those of the captured batch."""
    _priced: dict[_PriceKey, PricedChain] = field(init=False, default_factory=dict, repr=False)
    _means: dict[float, Mapping[str, Load]] = field(init=False, default_factory=dict, repr=False)
    _worst: dict[float, Mapping[str, Load]] = field(init=False, default_factory=dict, repr=False)
    _spread: dict[tuple[float, ...], float] = field(init=False, default_factory=dict, repr=False)
    _reduced: dict[tuple[int, Degrees], float] = field(init=False, default_factory=dict, repr=False)
    _drawn: dict[tuple[float, ...], Mapping[str, NDArray[np.float64]]] = field(
        init=False, default_factory=dict, repr=False
    )

    def mean_load(self, component: str, setting: Setting, degrees: Degrees, *, last: bool) -> Load | None:
        """Return the rows and squared lengths of a mean microbatch in a component on one replica; None if costs are fixed.

        Args:
            last: True for the chain that ends in the loss: the replica is the one with the most tokens in a step. Else any.
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
        """Return a component's load in the heaviest microbatch with the given number of samples (at least one)."""
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
        """Return component -> [draws, microbatches, 2]: tokens and sums of squared lengths on a chain's replica in random steps.

        Samples are taken as they come. A step lasts as long as its slowest replica, so the chain that ends in the loss (`last`)
        is represented by its replica with the most tokens. Replicas of other chains share each microbatch's samples evenly. The
        result is empty without a dataset, where all microbatches are equal.
        """
        if self.workload is None or self.workload.stats is None:
            return {}
        key = (setting.num_microbatches, setting.samples, setting.dp, 0 if last else degrees.dp)
        if key not in self._drawn:
            steps = [self._step(setting, draw) for draw in range(NUM_DRAWS)]
            heaviest = [int(step[self.graph.loss_component][..., 0].sum(axis=0).argmax()) for step in steps]
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
        """Return how unequal the microbatches of the last chain are: standard deviation of their tokens, divided by the mean."""
        key = (setting.num_microbatches, setting.samples, setting.dp)
        if key not in self._spread:
            loads = self.drawn_loads(setting, Degrees(dp=setting.dp), last=True)
            self._spread[key] = 0.0
            if loads:
                tokens = loads[self.graph.loss_component][..., 0]
                mean = np.maximum(tokens.mean(axis=1), 1e-9)
                self._spread[key] = float((tokens.std(axis=1) / mean).mean())
        return self._spread[key]

    def all_reduce_s(self, num_bytes: int, degrees: Degrees) -> float:
        """Return the seconds of an all-reduce of gradients over all ranks that hold the same parameters of a chain."""
        key = (num_bytes, degrees)
        if key not in self._reduced:
            peers = degrees.cp * degrees.dp
            together = self.pricing.cluster.together(peers, degrees.tp)
            self._reduced[key] = collective_s(
                "all_reduce", num_bytes, peers, self.pricing.cluster, ranks_in_a_node=together
            )
        return self._reduced[key]

    def _step(self, setting: Setting, draw: int) -> Mapping[str, NDArray[np.float64]]:
        """Return component -> loads of one randomly drawn training step, [microbatches, replicas of the last chain, 2].

        The last axis has tokens and the sum of squared sequence lengths. `draw` is the number of the random step.
        """
        key = (setting.num_microbatches, setting.samples, setting.dp, -1.0 - draw)
        if key not in self._drawn:
            assert self.workload is not None
            count = setting.num_microbatches * setting.dp
            loads = self.workload.draw(count, setting.samples, seed=_SEED + draw)
            self._drawn[key] = {
                name: np.stack([own.rows, own.squares], axis=-1).reshape(setting.num_microbatches, setting.dp, 2)
                for name, own in loads.items()
            }
        return self._drawn[key]

    def priced(self, chain: ChainSpec, degrees: Degrees, setting: Setting) -> PricedChain:
        """Return seconds and bytes of a chain's layers on one rank of a replica, cached for each sharding and microbatch size."""
        key = self._key(chain, degrees, setting)
        if key not in self._priced:
            self.price(chain, [(degrees, setting)])
        return self._priced[key]

    def price(self, chain: ChainSpec, ways: Iterable[tuple[Degrees, Setting]]) -> None:
        """Compute and cache the prices of a chain for many (degrees, setting) at once, several times faster than one by one."""
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
        """Return component -> (mean, heaviest) microbatch on one replica of a chain, as rows and squared lengths."""
        last = self.graph.loss_component in chain.components
        return {
            name: (
                self.mean_load(name, setting, degrees, last=last),
                self.worst_load(name, setting.samples_of(degrees)),
            )
            for name in chain.components
        }

    def _key(self, chain: ChainSpec, degrees: Degrees, setting: Setting) -> _PriceKey:
        drawn = self.workload is not None and self.workload.stats is not None
        loads = (
            (setting.num_microbatches, setting.dp) if drawn and self.graph.loss_component in chain.components else ()
        )
        return chain, degrees.sharding(setting.recompute), setting.samples_of(degrees), loads


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Problem that a strategy solves: a model with its prices, a cluster, data, and the choices that the request leaves."""

    prices: ChainPrices
    """Prices of the model's chains on the cluster, at the loads of the workload."""
    space: SearchSpace
    fingerprint: Fingerprint
    sets: tuple[ChainSet, ...] = ()
    """Alternatives to search: each groups the components into chains (components whose layers form one line of stages)."""
    global_batch: int | None = None
    """Number of samples of a step; None: the captured batch is one microbatch."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Chain name -> number of stages that the request fixes; the search chooses for a chain that is absent."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Chain or component name -> number of replicas that the request fixes; the search chooses for a name that is absent."""
    tensor_parallel: Mapping[str, int] = field(default_factory=dict)
    """Chain or component name -> ranks that share its tensors, 1 for those not named; empty where the search chooses for all."""
    fsdp: Collection[str] = ()
    """Chains and components whose replicas share their parameters."""
    replicas_follow: bool = False
    """True if chains without decided replicas have the last chain's number (1 if not named); False if the search chooses."""
    entries: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Component names (producer, consumer) -> index of the consumer's first layer that reads the producer; 0 where absent."""
    beat_s: float = float("inf")
    """Seconds of the fastest step known so far; candidates with a longer step need not be proposed."""

    @property
    def graph(self) -> ModelGraph:
        """Components of the model and the edges between them."""
        return self.prices.graph

    @property
    def pricing(self) -> Pricing:
        """Calculator of the prices of single layers."""
        return self.prices.pricing

    @property
    def workload(self) -> Workload | None:
        """Loads of the dataset's samples; None: every sample is like those of the captured batch."""
        return self.prices.workload

    @property
    def cluster(self) -> Cluster:
        """Cluster for which layers are priced."""
        return self.pricing.cluster

    @property
    def num_devices(self) -> int:
        """Number of devices that the plan may use."""
        return self.cluster.num_devices

    @cached_property
    def decided(self) -> Mapping[ChainSet, Decided]:
        """Chain set -> number of replicas of each chain that the request fixes, None for a chain left to the search."""
        found: dict[ChainSet, Decided] = {}
        for chains in self.sets:
            own = decided_replicas(chains, self.replicas, follow=self.replicas_follow)
            assert own is not None, f"{chains.chains[-1].name} and others cannot have replicas {self.replicas}"
            found[chains] = own
        return found

    def tensor_degrees(self, chain: ChainSpec) -> tuple[int, ...]:
        """Return the numbers of ranks that may share the tensors of a chain."""
        if not self.tensor_parallel:
            return self.space.tp
        named = {self.tensor_parallel[name] for name in chain.names if name in self.tensor_parallel}
        return tuple(named) or (1,)

    def shares_parameters(self, chain: ChainSpec, replicas: int) -> bool:
        """Return whether a chain with the given number of replicas shares its parameters between them (FSDP)."""
        return replicas > 1 and any(name in self.fsdp for name in chain.names)

    def least_ranks(self, chains: ChainSet, shards: int) -> int:
        """Return the ranks of the smallest candidate, if `shards` ranks share the tokens of each stage of the last chain."""
        last = len(chains.chains) - 1
        return sum(
            self.stages.get(chain.name, 1)
            * (number or 1)
            * min(self.tensor_degrees(chain))
            * (shards if index == last else 1)
            for index, (chain, number) in enumerate(zip(chains.chains, self.decided[chains], strict=True))
        )

    def memory_bytes(self, num_ranks: int) -> int:
        """Return a rank's memory in bytes: a device's, or, for more ranks than devices, that of all devices over `num_ranks`."""
        return self.cluster.device.memory_bytes * self.num_devices // max(self.num_devices, num_ranks)
