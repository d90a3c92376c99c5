"""`Problem`: all inputs of a strategy, as a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import ModelGraph
from mmcompile.planner.plan.plan_record import Fingerprint
from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.chain_prices import ChainPrices
from mmcompile.planner.search.replicas import Decided, decided_replicas
from mmcompile.planner.search.settings import SearchSpace


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model with its prices, cluster, data, and choices."""

    prices: ChainPrices
    """Prices of the model's chains on the cluster, at the loads of the workload."""
    sets: tuple[ChainSet, ...]
    """Possible lines of components."""
    num_devices: int
    """Number of devices that may be used."""
    space: SearchSpace
    fingerprint: Fingerprint
    global_batch: int | None = None
    """Samples of a step; None: the captured batch is one microbatch."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Chain name -> number of stages, if decided."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Chain or component name -> replicas, if decided."""
    tensor_parallel: Mapping[str, int] = field(default_factory=dict)
    """Chain or component name -> ranks that share its tensors, 1 for those not named; empty where the search chooses for all."""
    fsdp: Collection[str] = ()
    """Chains and components whose replicas share their parameters."""
    replicas_follow: bool = False
    """True: chains without decided replicas have as many as the last, which then has 1 if not named; else the search chooses."""
    entries: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(producer, consumer) -> first layer of the consumer that reads the producer; 0 where absent."""
    beat_s: float = float("inf")
    """Seconds of a known step: candidates that take longer need not be proposed."""

    @property
    def graph(self) -> ModelGraph:
        """Components of the model and the edges between them."""
        return self.prices.graph

    @property
    def pricing(self) -> Pricing:
        """Prices of single layers."""
        return self.prices.pricing

    @property
    def workload(self) -> Workload | None:
        """Loads that samples bring; None: every sample is like those of the captured batch."""
        return self.prices.workload

    @property
    def loss_component(self) -> str:
        """The component that ends in the loss."""
        return self.graph.loss_component

    @property
    def cluster(self) -> Cluster:
        """Cluster of the prices."""
        return self.pricing.cluster

    @cached_property
    def decided(self) -> Mapping[ChainSet, Decided]:
        """Return chain set -> replicas of each of its chains; None where the search chooses."""
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
        named = {self.tensor_parallel[name] for name in (chain.name, *chain.components) if name in self.tensor_parallel}
        return tuple(named) or (1,)

    def shares_parameters(self, chain: ChainSpec, replicas: int) -> bool:
        """Return whether so many replicas of a chain share its parameters."""
        return replicas > 1 and any(name in self.fsdp for name in (chain.name, *chain.components))

    def least_ranks(self, chains: ChainSet, shards: int) -> int:
        """Ranks of the smallest candidate; `shards` ranks share the tokens of each stage of a replica of the last chain."""
        last = len(chains.chains) - 1
        return sum(
            self.stages.get(chain.name, 1)
            * (number or 1)
            * min(self.tensor_degrees(chain))
            * (shards if index == last else 1)
            for index, (chain, number) in enumerate(zip(chains.chains, self.decided[chains], strict=True))
        )

    def memory_bytes(self, num_ranks: int) -> int:
        """Return the memory of one rank; processes beyond the cores of this machine share its memory too."""
        devices = self.cluster.num_devices
        return self.cluster.device.memory_bytes * devices // max(devices, num_ranks)
