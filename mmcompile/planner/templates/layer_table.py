"""`LayerTable`: costs of the layers of chains on 1, 2, 4, .. devices of one node. All that template planning reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmcompile.errors import PlanError

_MOST_S = 3600.0
"""Largest accepted seconds of a chain for one microbatch: sums of whole picoseconds then stay far below 2^60."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedLayers:
    """Costs of a chain's layers when each is shared by `devices` devices of one node, for one microbatch: one value per layer."""

    devices: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    """Bytes of parameters, gradients and optimizer state of each layer on one of the devices."""
    activation_bytes: tuple[int, ...]
    """Bytes of activations of each layer kept for the backward on one of the devices."""
    send_s: tuple[float, ...] = ()
    """Seconds to send each layer's output, counted for the stage that ends with the layer; () if sends take no time."""
    return_s: tuple[float, ...] = ()
    """Seconds to return the gradient of each layer's output, counted for the stage that begins right after it; () if none."""
    working_bytes: int = 0
    """Further bytes of every stage: activations that its backward recomputes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLayers:
    """Costs of a chain's layers for each possible number of devices, and the chain that reads its output."""

    name: str
    shared: tuple[SharedLayers, ...]
    """Costs of the layers for each number of devices, in ascending order of devices."""
    feeds: str | None = None
    """Name of the later chain that reads this chain's output; None for the chain that ends in the loss."""
    entry: int = 0
    """Index of the layer, in the chain `feeds`, that reads this chain's output; above 0 if the output enters in the middle."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the chain."""
        return len(self.shared[0].forward_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTable:
    """Costs of the layers of all chains, in topological order; every chain feeds a later one, and the last ends in the loss.

    Raises:
        PlanError: chains, layers or device counts do not fit together; the message names them.
    """

    chains: tuple[ChainLayers, ...]
    devices_per_node: int
    memory_bytes: int | None = None
    """Bytes of memory of one device; None for no limit."""

    def __post_init__(self) -> None:
        if not self.chains:
            raise PlanError("a layer table without chains has nothing to plan; give at least one chain")
        if self.devices_per_node < 1:
            raise PlanError(f"a layer table has {self.devices_per_node} devices a node; give 1 or more")
        names = [chain.name for chain in self.chains]
        for index, chain in enumerate(self.chains):
            self._check_layers(chain)
            self._check_target(index, names)

    @property
    def devices(self) -> tuple[int, ...]:
        """Possible numbers of devices of one stage."""
        return tuple(shared.devices for shared in self.chains[0].shared)

    @property
    def num_layers(self) -> int:
        """Number of layers of all chains together."""
        return sum(chain.num_layers for chain in self.chains)

    def _check_layers(self, chain: ChainLayers) -> None:
        own = tuple(shared.devices for shared in chain.shared)
        if not own or own != self.devices:
            raise PlanError(f"chain {chain.name} is priced on {own} devices, {self.chains[0].name} on {self.devices}")
        if any(a >= b for a, b in pairwise((0, *own))) or own[-1] > self.devices_per_node:
            raise PlanError(
                f"chain {chain.name} is priced on {own} devices; give rising counts up to the {self.devices_per_node} of a node"
            )
        for shared in chain.shared:
            columns: tuple[Sequence[float], ...] = (
                shared.forward_s,
                shared.backward_s,
                shared.parameter_bytes,
                shared.activation_bytes,
                shared.send_s or shared.forward_s,
                shared.return_s or shared.forward_s,
            )
            counts = {len(column) for column in columns}
            if counts != {chain.num_layers} or not chain.num_layers:
                raise PlanError(
                    f"chain {chain.name} on {shared.devices} devices has columns of {sorted(counts)} layers"
                )
            if any(value < 0 for column in columns for value in column):
                raise PlanError(f"chain {chain.name} on {shared.devices} devices has a layer of negative cost")
            total_s = sum(map(sum, (shared.forward_s, shared.backward_s, shared.send_s, shared.return_s)))
            if total_s > _MOST_S:
                raise PlanError(
                    f"chain {chain.name} on {shared.devices} devices takes {total_s:,.0f} s for a microbatch, and times are "
                    f"counted up to {_MOST_S:,.0f} s; give seconds, or use smaller microbatches"
                )

    def _check_target(self, index: int, names: Sequence[str]) -> None:
        chain, later = self.chains[index], names[index + 1 :]
        if index == len(names) - 1:
            if chain.feeds is not None:
                raise PlanError(f"chain {chain.name} is last, so it ends in the loss, but feeds {chain.feeds}")
        elif chain.feeds not in later or names.count(chain.feeds) > 1:
            raise PlanError(f"chain {chain.name} feeds {chain.feeds}; it must feed one of {', '.join(later)}")
        else:
            target = self.chains[names.index(chain.feeds)]
            if not 0 <= chain.entry < target.num_layers:
                raise PlanError(
                    f"chain {chain.name} enters {target.name} at layer {chain.entry}; its layers are 0 to {target.num_layers - 1}"
                )
