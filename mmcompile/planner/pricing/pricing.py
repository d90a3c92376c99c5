"""`Pricing`: seconds and bytes of layers in any layout and at any load, from one table of costs.

A layer's cost passes through the recomputation, then tensor, context and data sharding; then it becomes seconds, by the
roofline or by a calibration. Layers of the same cost are priced once.

Many microbatches are priced at a time: every amount is affine in the load (`mmcompile.costmodel.load`), so three
loads give its coefficients, and the roofline of all microbatches is a few array operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log2

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import Recompute
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.load import Load
from mmcompile.costmodel.memory import recomputed
from mmcompile.costmodel.sharding import TensorShare, context_parallel, fully_sharded, tensor_parallel
from mmcompile.passes.cost.cost_table import CostTable

# Names of the amounts in order. The first `_TIMED` determine the seconds, the others are the sizes in `LayerBytes`.
_AMOUNTS = (
    "forward_flops",
    "input_grad_flops",
    "weight_grad_flops",
    "forward_bytes",
    "backward_bytes",
    "kernels",
    "backward_kernels",
    "forward_exchange_s",
    "backward_exchange_s",
    "parameter_bytes",
    "trainable_bytes",
    "activation_bytes",
    "working_bytes",
    "output_bytes",
    "shared_bytes",
)
_TIMED = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSharding:
    """Sharding of a layer over the ranks of one replica, and the recomputation in its backward."""

    tp: int = 1
    """Tensor-parallel degree: ranks that share the tensors of the layer."""
    cp: int = 1
    """Context-parallel degree: ranks that share the tokens of a microbatch."""
    fsdp: int = 1
    """Number of replicas that shard the layer's parameters (FSDP) and gather them when needed; 1 for none."""
    recompute: Recompute = "none"
    mixed: bool = False
    """True if other layers of the same stage have another recomputation mode."""


WHOLE = LayerSharding()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Bytes of one layer of each group of a component's layers that cost the same, as arrays [groups, microbatches]."""

    backward: NDArray[np.bool_]
    """True where the layers of a group run a backward for a microbatch, [groups, microbatches]."""
    parameter: NDArray[np.int64]
    trainable: NDArray[np.int64]
    activation: NDArray[np.int64]
    working: NDArray[np.int64]
    output: NDArray[np.int64]
    shared: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers of one component, not always neighbours, that cost the same at every load and so are priced once."""

    first: int
    """Index of the first layer of the group."""
    kind: str
    merges: bool
    shares: tuple[tuple[int, TensorShare], ...]
    """(tensor-parallel degree, share and collectives of each rank), for every degree that is known."""


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """Calculator of the prices of a model's layers on one cluster. `kinds` and `calibration` are given together."""

    table: CostTable
    """Costs of all layers; those of a component that is absent from `CostTable.growing` are the same for every microbatch."""
    cluster: Cluster
    dtype: str
    merging: frozenset[str] = frozenset()
    """Components whose first layer merges rows of other components; ranks that share tokens all do that layer's whole work."""
    token_sharing: frozenset[str] | None = None
    """Components whose tokens ranks can share; None: all. In any other component each rank does all of the work."""
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component -> kind of each layer, by the names that the calibration uses."""
    calibration: Calibration | None = None
    given_cp: int = 1
    """Context-parallel degree for which `table` was made: its costs are those of one such rank."""
    tensor_degrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Component -> possible tensor-parallel degrees; all degrees for a component that is absent.

    At an impossible degree each rank does all of the work, unless `tensor_shares` has an entry for the degree.
    """
    tensor_shares: Mapping[str, Mapping[int, tuple[TensorShare, ...]]] = field(default_factory=dict)
    """Component -> tensor-parallel degree -> share and collectives (at the captured load) of a rank in each layer.

    A component that is absent has the shares of `TensorShare.assumed`.
    """
    _groups: dict[str, tuple[NDArray[np.int64], tuple[LayerGroup, ...]]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _tables: dict[tuple[str, Load | None], tuple[LayerCost, ...]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _shared: dict[tuple[LayerCost, LayerSharding, bool, TensorShare | None], LayerCost] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _affine: dict[tuple[str, LayerSharding, int], NDArray[np.float64]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def costs(self, component: str, load: Load | None = None, sharding: LayerSharding = WHOLE) -> tuple[LayerCost, ...]:
        """Return the cost of each layer of a component on one rank, for a microbatch with a load; None: the captured load."""
        each = self._shared_costs(component, load, self._possible(component, sharding))
        return tuple(each[group] for group in self.groups(component))

    def groups(self, component: str) -> NDArray[np.int64]:
        """Return the group number of each layer, [layers]; layers of one group cost the same at every load."""
        return self._grouped(component)[0]

    def bulk(
        self, component: str, tokens: NDArray[np.float64], squares: NDArray[np.float64], sharding: LayerSharding = WHOLE
    ) -> tuple[NDArray[np.float64], LayerBytes]:
        """Return seconds and bytes of a component's layers for n microbatches, one of each group of layers that cost the same.

        The microbatches have rows `tokens` [n] and sums of squared lengths `squares` [n].

        Returns:
            [groups, n, 3] seconds of forward, input gradient, weight gradient; [groups, n] bytes of parameters and so on.
        """
        sharding = self._possible(component, sharding)
        size = np.array([self._size(component, own) for own in tokens.tolist()])
        loads = np.stack([np.ones_like(tokens), tokens, squares])
        parts = [
            (size == each, self._coefficients(component, sharding, each) @ loads[:, size == each])
            for each in sorted(set(size.tolist()))
        ]
        amounts = np.empty((len(parts[0][1]), len(_AMOUNTS), len(tokens)))
        for where, part in parts:
            amounts[:, :, where] = np.maximum(part, 0.0)
        seconds = self._roofline(amounts[:, :_TIMED])
        if self.calibration is not None:
            for where, _ in parts:
                seconds[:, where] = self.group_durations(component, tokens[where], squares[where], sharding)
        runs = (tokens > 0) | (component not in self.table.growing)
        seconds *= runs[:, None]
        whole = np.rint(amounts[:, _TIMED:]).astype(np.int64)
        return seconds, LayerBytes(
            backward=(amounts[:, 1] + amounts[:, 2] > 0) & runs,
            parameter=whole[:, 0],
            trainable=whole[:, 1],
            activation=whole[:, 2] * runs,
            working=whole[:, 3] * runs,
            output=whole[:, 4] * runs,
            shared=whole[:, 5] * runs,
        )

    def group_durations(
        self, component: str, tokens: NDArray[np.float64], squares: NDArray[np.float64], sharding: LayerSharding = WHOLE
    ) -> NDArray[np.float64]:
        """Return the seconds of n microbatches in one layer of each group of layers that cost the same, [groups, n, 3].

        They are seconds of forward, input and weight gradient, for rows `tokens` and squared lengths `squares`, both [n]. A
        microbatch without tokens takes no time.
        """
        sharding = self._possible(component, sharding)
        size = self._size(component, float(tokens.mean()))
        loads = np.stack([np.ones_like(tokens), tokens, squares])
        seconds = self._roofline(self._coefficients(component, sharding, size)[:, :_TIMED] @ loads)
        for index, group in enumerate(self._grouped(component)[1]):
            measured = self._measured(component, group, sharding.tp)
            if measured is not None:
                coefficients, known = measured
                base = self._roofline(self._coefficients(component, known, size)[[index], :_TIMED] @ loads)[0]
                ratio = np.divide(seconds[index], base, out=np.ones_like(base), where=base > 0)
                seconds[index] = np.maximum(loads.T @ coefficients.T, 0.0) * ratio
        if component in self.table.growing:
            seconds[:, tokens <= 0] = 0.0
        return seconds

    def _possible(self, component: str, sharding: LayerSharding) -> LayerSharding:
        """Return the sharding with every degree that the component does not support set to 1."""
        if not self._shares_tokens(component):
            sharding = replace(sharding, cp=1)
        possible = (*self.tensor_degrees.get(component, (sharding.tp,)), *self.tensor_shares.get(component, ()))
        return sharding if sharding.tp in possible else replace(sharding, tp=1)

    def _shares_tokens(self, component: str) -> bool:
        return self.token_sharing is None or component in self.token_sharing

    def _grouped(self, component: str) -> tuple[NDArray[np.int64], tuple[LayerGroup, ...]]:
        """Return the index of each layer's group, [layers], and the groups of a component; layers of one group cost the same."""
        if component not in self._groups:
            growing = self.table.growing.get(component) or self.table[component]
            kinds = self.kinds.get(component, ("",) * len(growing))
            by_degree = self.tensor_shares.get(component, {})
            known: dict[tuple[object, ...], int] = {}
            groups: list[LayerGroup] = []
            of_layer: list[int] = []
            for index, (cost, kind) in enumerate(zip(growing, kinds, strict=True)):
                merges = index == 0 and component in self.merging
                shares = tuple((tp, each[index]) for tp, each in by_degree.items())
                number = known.setdefault((cost, kind, merges, shares), len(groups))
                if number == len(groups):
                    groups.append(LayerGroup(first=index, kind=kind, merges=merges, shares=shares))
                of_layer.append(number)
            self._groups[component] = np.array(of_layer), tuple(groups)
        return self._groups[component]

    def _costs(self, component: str, load: Load | None) -> tuple[LayerCost, ...]:
        key = (component, load)
        if key not in self._tables:
            first = [group.first for group in self._grouped(component)[1]]
            table = self.table
            costs = tuple(table[component][index] for index in first)
            if load is not None and component in table.growing:
                one_each = CostTable(
                    layers={component: costs},
                    loads={component: table.loads[component]},
                    growing={component: tuple(table.growing[component][index] for index in first)},
                    captured_loads={component: table.captured_loads[component]},
                )
                costs = one_each.at({component: load})[component]
            self._tables[key] = costs
        return self._tables[key]

    def _share(
        self, component: str, cost: LayerCost, group: LayerGroup, load: Load | None, sharding: LayerSharding
    ) -> LayerCost:
        share = dict(group.shares).get(sharding.tp)
        if share is not None:
            already = self.given_cp if self._shares_tokens(component) and not group.merges else 1
            share = share.scaled(self._rows(component, load) / already)
        key = (cost, sharding, group.merges, share)
        if key not in self._shared:
            again, cluster, tp = sharding.recompute, self.cluster, sharding.tp
            cost = tensor_parallel(cost, tp, cluster, recompute=again, share=share)
            cost = recomputed(cost, again, mixed=sharding.mixed)
            if not group.merges:
                cp = max(1, sharding.cp // self.given_cp)
                cost = context_parallel(cost, cp, cluster, dtype=self.dtype, recompute=again, stride=tp)
            self._shared[key] = fully_sharded(cost, sharding.fsdp, cluster, dtype=self.dtype)
        return self._shared[key]

    def _rows(self, component: str, load: Load | None) -> float:
        """Return a load's rows divided by those of the captured batch; 1 where costs do not depend on the load."""
        if load is None or component not in self.table.growing:
            return 1.0
        captured = self.table.captured_loads[component].tokens
        return load.tokens / captured if captured else 0.0

    def _size(self, component: str, tokens: float) -> int:
        """Return the even exponent e with 2^e nearest, on a log scale, to `tokens` divided by the captured batch's tokens.

        Near each power of four, a layer's costs have their own coefficients, as collectives are not affine over all sizes.
        """
        if component not in self.table.growing:
            return 0
        captured = self.table.captured_loads[component].tokens
        return 2 * round(log2(tokens / captured) / 2) if tokens > 0 and captured > 0 else 0

    def _coefficients(self, component: str, sharding: LayerSharding, size: int) -> NDArray[np.float64]:
        """Return (constant, per token, per squared length) of each cost of a layer (FLOPs, bytes, and so on).

        The shape is [groups of equal layers, costs, 3]. They hold near 2^`size` times the tokens of the captured batch.
        """
        key = (component, sharding, size)
        if key not in self._affine:
            if component in self.table.growing:
                at = self.table.captured_loads[component] * 2.0**size
                points = np.stack([self._amounts(component, load, sharding) for load in _three(at)])
                self._affine[key] = _affine(points, at)
            else:
                fixed = self._amounts(component, None, sharding)
                self._affine[key] = np.stack([fixed, np.zeros_like(fixed), np.zeros_like(fixed)], axis=-1)
        return self._affine[key]

    def _amounts(self, component: str, load: Load | None, sharding: LayerSharding) -> NDArray[np.float64]:
        costs = self._shared_costs(component, load, sharding)
        return np.array([[float(getattr(cost, name)) for name in _AMOUNTS] for cost in costs])

    def _shared_costs(self, component: str, load: Load | None, sharding: LayerSharding) -> list[LayerCost]:
        groups = self._grouped(component)[1]
        return [
            self._share(component, cost, group, load, sharding)
            for cost, group in zip(self._costs(component, load), groups, strict=True)
        ]

    def _roofline(self, amounts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return seconds of forward, input and weight gradient, [groups, loads, 3], from FLOPs, bytes, ... [groups, 9, loads]."""
        device = self.cluster.device
        flops_per_s, bytes_per_s = device.flops_per_s(self.dtype), device.memory_bytes_per_s
        by_name = np.maximum(amounts, 0.0).transpose(1, 0, 2)
        forward, input_grad, weight_grad, read, back, kernels, back_kernels, there_s, back_s = by_name
        found = np.empty((*forward.shape, 3))
        found[..., 0] = np.maximum(forward / flops_per_s, read / bytes_per_s) + kernels * device.launch_s + there_s
        backward = input_grad + weight_grad
        backward_s = np.maximum(backward / flops_per_s, back / bytes_per_s) + back_kernels * device.launch_s
        runs = backward > 0
        share = input_grad / np.where(runs, backward, 1.0)
        found[..., 1] = runs * (backward_s * share + back_s)
        found[..., 2] = runs * backward_s * (1 - share)
        return found

    def _measured(self, component: str, group: LayerGroup, tp: int) -> tuple[NDArray[np.float64], LayerSharding] | None:
        """Return measured seconds as coefficients [3, 3]: (forward, input and weight gradient) x (fixed, per token, per square).

        The second result is the sharding of the measurement: degree `tp` if measured, else 1. None if the kind was not measured.
        """
        if component not in self.table.growing or self.calibration is None:
            return None
        at = self.table.captured_loads[component]
        for known in (tp, 1):
            times = [self.calibration.times(group.kind, load, known) for load in _three(at)]
            points = [(own.forward_s, own.input_grad_s, own.weight_grad_s) for own in times if own is not None]
            if points:
                return _affine(np.array(points), at), LayerSharding(tp=known)
        return None


def _three(at: Load) -> tuple[Load, Load, Load]:
    """Return `at`, `at` with twice the tokens, and `at` with twice the squared lengths: they determine an affine function."""
    return at, replace(at, tokens=2 * at.tokens), replace(at, squares=2 * at.squares)


def _affine(points: NDArray[np.float64], at: Load) -> NDArray[np.float64]:
    # Coefficients (constant, per token, per squared length), [..., 3]; `points` [3, ...] are values at the loads of `_three(at)`.
    tokens, squares = points[1] - points[0], points[2] - points[0]
    return np.stack(
        [
            points[0] - tokens - squares,
            tokens / at.tokens if at.tokens else tokens,
            squares / at.squares if at.squares else squares,
        ],
        axis=-1,
    )
