"""`Layout`: a way to run a model but for its cuts; how two of them differ; what a step is spent on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.problem import balance_groups_of
from mmcompile.planner.search.settings import Combination

Axis = Literal["tp", "cp", "pp", "dp", "fsdp"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(Combination):
    """A combination whose axes can be changed one by one."""

    @classmethod
    def of(cls, candidate: Candidate) -> Layout:
        return cls(
            chains=candidate.chains, setting=candidate.setting, degrees=candidate.degrees, counts=candidate.counts
        )

    @property
    def ranks(self) -> int:
        return sum(own.ranks * count for own, count in zip(self.degrees, self.counts, strict=True))

    def value(self, chain: int, axis: Axis) -> int:
        """Of one axis of a chain; of `fsdp` 0 or 1."""
        return self.counts[chain] if axis == "pp" else int(getattr(self.degrees[chain], axis))

    def changed(self, chain: int, values: Mapping[Axis, int]) -> Layout:
        """With other values on some axes of a chain. Chains of a tower have equally many replicas, so they go along."""
        degrees, counts, setting = list(self.degrees), list(self.counts), self.setting
        counts[chain] = values.get("pp", counts[chain])
        own = {axis: value for axis, value in values.items() if axis in ("tp", "cp", "dp")}
        degrees[chain] = replace(degrees[chain], **own, fsdp=bool(values.get("fsdp", degrees[chain].fsdp)))
        if "dp" in values:
            tower = next(tower for tower in balance_groups_of(self.chains) if chain in tower)
            for other in tower:
                degrees[other] = replace(degrees[other], dp=values["dp"])
            if chain == len(degrees) - 1:
                setting = replace(setting, dp=values["dp"], samples=setting.samples * setting.dp / values["dp"])
        degrees = [replace(each, fsdp=each.fsdp and each.dp > 1) for each in degrees]
        return replace(self, degrees=tuple(degrees), counts=tuple(counts), setting=setting)

    def microbatched(self, count: int) -> Layout:
        setting = self.setting
        samples = setting.samples * setting.num_microbatches / count
        return replace(self, setting=replace(setting, num_microbatches=count, samples=samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """A step as a device spends it, the mean over all devices of the cluster [s]."""

    compute_s: float
    exchange_s: float
    """Collectives of tensor, context and data sharding that nothing hides."""
    update_s: float
    """Gradients reduced over replicas behind the last backward, and the optimizer."""
    idle_s: float
    """Bubbles, messages, and devices that are not used."""

    @classmethod
    def of(cls, candidate: Candidate, step_s: float) -> Spent:
        devices = candidate.problem.cluster.num_devices
        exchange_s = sum(_exchange_s(candidate, chain) for chain in range(len(candidate.degrees))) / devices
        pairs = zip(candidate.tail_s, candidate.stages, strict=True)
        update_s = sum(tail_s * len(stage.ranks) for tail_s, stage in pairs) / devices
        busy_s = candidate.step_work_s / devices
        return cls(
            compute_s=busy_s - exchange_s - update_s,
            exchange_s=exchange_s,
            update_s=update_s,
            idle_s=step_s - busy_s,
        )


def _exchange_s(candidate: Candidate, chain: int) -> float:
    """Device seconds of a step."""
    problem, setting, degrees = candidate.problem, candidate.setting, candidate.degrees[chain]
    last, total_s = chain == len(candidate.degrees) - 1, 0.0
    for layer in candidate.chains.chains[chain].layers:
        load = problem.prices.mean_load(layer.component, setting, degrees, last=last)
        sharding = degrees.sharding(setting.recompute)
        own = load if load is None or layer.share == 1.0 else load * layer.share
        cost = problem.pricing.costs(layer.component, own, sharding)[layer.index]
        total_s += cost.forward_exchange_s + cost.backward_exchange_s
    return total_s * setting.num_microbatches * degrees.ranks


def shares(slot: int, last_dp: int, dp: int) -> bool:
    """Whether replicas of an encoder can share the samples of a slot of all replicas of the last chain."""
    return slot % dp == 0 and (last_dp % dp == 0 or dp % last_dp == 0)


def differences(there: Layout, here: Layout, chain: int, axis: Axis) -> Iterator[str]:
    for index, spec in enumerate(here.chains.chains):
        for other in AXES:
            value = there.value(index, other)
            if value != here.value(index, other) and (index, other) != (chain, axis):
                name = "" if index == chain else f"{spec.name} "
                yield f"{name}{other} {value}" if other != "fsdp" else f"{name}{'' if value else 'no '}fsdp"
    if there.setting.num_microbatches != here.setting.num_microbatches:
        count = there.setting.num_microbatches
        yield f"{count} microbatch{'es' if count > 1 else ''}"
    if there.setting.recompute != here.setting.recompute:
        yield f"recompute {there.setting.recompute}"
    if there.ranks != here.ranks:
        yield f"{there.ranks} devices"
