"""Why a layout is as it is: what the step would take with one axis of one chain changed.

Devices that a change frees, or needs, go to or come from another axis of the chain or the stages of another chain, whichever is
fastest; microbatches may be half or twice as many. Only where nothing fits is more computed again. So a reason compares with
the best use of the same devices, not with a plan that leaves half of them idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from axes_layouts import AXES, Axis, Layout, Spent, differences, shares

from mmcompile.ir.graph import ComponentKind
from mmcompile.passes.tensor_parallel.tensor_axes import TensorAxes
from mmcompile.planner.pricing.chains import ChainSpec
from mmcompile.planner.search.bounds import lower_bound_s
from mmcompile.planner.search.branch_and_bound import TOLERANCE, BranchAndBound
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import RECOMPUTES, Setting

WORTH_A_LOOK = 1.3
"""Candidates whose bound is further above the step are not simulated, once one that fits is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One axis of one chain at another value."""

    axis: Axis
    value: int
    impossible: str = ""
    """Why it cannot be, in words."""
    needs_bytes: int = 0
    """Of the fullest rank, where that is too much with as much computed again as now; else 0."""
    step_s: float = 0.0
    """0 where nothing fits."""
    spent: Spent | None = None
    also: tuple[str, ...] = ()
    """What else is not as it was."""


def worded(tried: Tried, step_s: float, spent: Spent, memory_bytes: int) -> str:
    """`"tp 2 (pp 6): 11% slower, exchanges +0.4 s"`.

    Args:
        step_s, spent: of the layout as it is.
        memory_bytes: of a device.
    """
    name = ("fsdp" if tried.value else "no fsdp") if tried.axis == "fsdp" else f"{tried.axis} {tried.value}"
    if tried.impossible:
        return f"{name}: {tried.impossible}"
    also = f" ({', '.join(tried.also)})" if tried.also else ""
    pace = "" if tried.spent is None else _pace(tried.step_s / step_s - 1, _most(tried.spent, spent))
    if not tried.needs_bytes:
        return f"{name}{also}: {pace}"
    tight = f"{name}: a stage needs {tried.needs_bytes / 2**30:.0f} GiB of {memory_bytes / 2**30:.0f}"
    return f"{tight}; it fits{also}, {pace}" if pace else tight


def _pace(slower: float, why: str) -> str:
    if slower < -TOLERANCE:
        return f"{-slower:.1%} faster"
    if slower <= TOLERANCE:
        return "as fast"
    return f"{slower:.0%} slower, {why}" if slower < 1 else f"{slower + 1:.1f} times as long, {why}"


def _most(there: Spent, here: Spent) -> str:
    """What grows most."""
    words = {"compute_s": "computing", "exchange_s": "exchanges", "update_s": "gradients and optimizer"}
    words["idle_s"] = "waiting"
    more = {word: getattr(there, name) - getattr(here, name) for name, word in words.items()}
    word = max(more, key=more.__getitem__)
    return f"{word} +{more[word]:.2g} s"


@dataclass(kw_only=True)
class Surroundings:
    """The fastest layout around one that is given, and what is around it."""

    problem: Problem
    tensor: Mapping[str, TensorAxes]
    no_cp: str = ""
    """Why tokens cannot be shared; empty if they can."""

    def climb(self, candidate: Candidate, step_s: float) -> tuple[Candidate, float, list[list[Tried]]]:
        """Move to the fastest neighbour until none is faster: the layout, its step, and what was tried around it by chain."""
        while True:
            here = Layout.of(candidate)
            tried: list[list[Tried]] = []
            best, best_s = candidate, step_s
            for chain in range(len(here.counts)):
                tried.append([])
                for axis in AXES:
                    for value in self._values(here, chain, axis):
                        found, rival = self._try(here, chain, axis, value, step_s)
                        tried[-1].append(found)
                        if rival is not None and found.step_s < best_s:
                            best, best_s = rival, found.step_s
            if best_s >= step_s * (1 - TOLERANCE):
                return candidate, step_s, tried
            candidate, step_s = best, best_s

    def _values(self, here: Layout, chain: int, axis: Axis) -> list[int]:
        """One step down and one up."""
        own, last = here.value(chain, axis), chain == len(here.counts) - 1
        match axis:
            case "tp":
                return [own // 2, own * 2] if own > 1 else [2]
            case "cp":
                return ([own // 2, own * 2] if own > 1 else [2]) if last else []
            case "pp":
                return [value for value in (own - 1, own + 1) if 1 <= value <= len(here.chains.chains[chain].layers)]
            case "dp":
                allowed = self._replicas(here.setting, last=last)
                fewer = [value for value in allowed if value < own and own % value == 0]
                return [*fewer[-1:], *[value for value in allowed if value > own and value % own == 0][:1]]
            case "fsdp":
                return [0] if own else [1] if here.value(chain, "dp") > 1 else []

    def _replicas(self, setting: Setting, *, last: bool) -> list[int]:
        batch = self.problem.global_batch
        assert batch is not None, "a step without a batch"
        most = self.problem.num_devices
        if last:
            return [count for count in range(1, most + 1) if batch % count == 0]
        slot = round(setting.samples * setting.dp)
        return [count for count in range(1, min(slot, most) + 1) if shares(slot, setting.dp, count)]

    def _try(self, here: Layout, chain: int, axis: Axis, value: int, step_s: float) -> tuple[Tried, Candidate | None]:
        why = self._impossible(here.chains.chains[chain], axis, value)
        found = Tried(axis=axis, value=value, impossible=why)
        if why:
            return found, None
        ways = list(dict.fromkeys(self._ways(here, chain, axis, value)))
        if not ways:
            few = all(way.ranks > self.problem.num_devices for way in self._balanced(here, chain, axis, value))
            why = f"more than {self.problem.num_devices} devices" if few else "no even share of the samples"
            return replace(found, impossible=why), None
        again = RECOMPUTES.index(here.setting.recompute)
        for recompute in (RECOMPUTES[again], *RECOMPUTES[:again:-1]):
            own = [replace(way, setting=replace(way.setting, recompute=recompute)) for way in ways]
            best = self._fastest(own, step_s)
            if best is not None:
                layout, candidate, seconds = best
                spent = Spent.of(candidate, seconds)
                also = tuple(differences(layout, here, chain, axis))
                return replace(found, step_s=seconds, spent=spent, also=also), candidate
            if recompute == here.setting.recompute:
                found = replace(found, needs_bytes=min(map(self._needs, own)))
        return found, None

    def _impossible(self, chain: ChainSpec, axis: Axis, value: int) -> str:
        most = self.problem.cluster.devices_per_node
        if axis in ("tp", "cp") and value > most:
            return f"a node has {most} devices"
        kinds = {component.name: component.kind for component in self.problem.graph.components}
        main = [name for name in chain.components if kinds[name] is not ComponentKind.PROJECTOR]
        if axis == "cp" and value > 1:
            return "encoders of the line cannot share tokens" if len(main) > 1 else self.no_cp
        if axis == "tp":
            own = [self.tensor[name] for name in main or chain.components]
            if all(value not in each.degrees for each in own):
                return own[0].reasons.get(value, "it cannot be sharded so")
        return ""

    def _ways(self, here: Layout, chain: int, axis: Axis, value: int) -> Iterator[Layout]:
        """Layouts with that value that have enough devices, in every way to make up for it, and with other microbatches."""
        for way in self._balanced(here, chain, axis, value):
            slot, dp = round(way.setting.samples * way.setting.num_microbatches), way.setting.dp
            same = here.setting.samples
            counts = {way.setting.num_microbatches, round(slot / same), round(slot / same) * 2, round(slot / same / 2)}
            for count in sorted(count for count in counts if count and slot % count == 0):
                own = way.microbatched(count)
                samples = round(own.setting.samples * dp)
                if way.ranks <= self.problem.num_devices and all(
                    shares(samples, dp, degrees.dp) for degrees in way.degrees[:-1]
                ):
                    yield own

    def _balanced(self, here: Layout, chain: int, axis: Axis, value: int) -> Iterator[Layout]:
        plain = here.changed(chain, {axis: value})
        yield plain
        before = here.value(chain, axis)
        if axis == "fsdp":
            return
        for other in ("tp", "cp", "pp", "dp"):
            own = here.value(chain, other)
            if other == axis or (other == "cp" and own == 1):
                continue
            made_up = own * before // value
            exact = made_up * value == own * before
            layers = len(here.chains.chains[chain].layers)
            if made_up < 1 or (other == "pp" and made_up > layers) or (other != "pp" and not exact):
                continue
            if other in ("tp", "cp") and (
                made_up & (made_up - 1) or self._impossible(here.chains.chains[chain], other, made_up)
            ):
                continue
            if other == "dp" and made_up not in self._replicas(here.setting, last=chain == len(here.counts) - 1):
                continue
            yield here.changed(chain, {axis: value, other: made_up})
        for rest, degrees in enumerate(plain.degrees):
            if rest != chain:
                count = plain.counts[rest] + (self.problem.num_devices - plain.ranks) // degrees.ranks
                if 1 <= count <= len(here.chains.chains[rest].layers):
                    yield plain.changed(rest, {"pp": count})

    def _fastest(self, layouts: Sequence[Layout], step_s: float) -> tuple[Layout, Candidate, float] | None:
        engine = BranchAndBound(problem=self.problem)
        found: list[tuple[Layout, Candidate]] = []
        for layout in layouts:
            candidate = engine.draft(layout)
            if candidate is None:
                # What is computed again, or gathered, counts layer by layer there; stages of several components hold less.
                candidate = self._unlimited(layout)
            if max(candidate.rank_bytes) <= self.problem.memory_bytes(candidate.num_ranks):
                found.append((layout, candidate))
        bounds = [lower_bound_s(candidate) for _, candidate in found]
        limit_s = max(WORTH_A_LOOK * step_s, 1.2 * min(bounds, default=0.0))
        found = [pair for pair, bound_s in zip(found, bounds, strict=True) if bound_s <= limit_s]
        engine.judge([candidate for _, candidate in found])
        each = [(*pair, judged.iteration_s) for pair, judged in zip(found, engine.judged, strict=True)]
        return min(each, key=lambda one: one[2], default=None)

    def _needs(self, layout: Layout) -> int:
        """Bytes of the fullest rank with the cuts that are fastest if memory does not matter."""
        return max(self._unlimited(layout).rank_bytes)

    def _unlimited(self, layout: Layout) -> Candidate:
        splitter = BranchAndBound(problem=self.problem).splitter
        parts = splitter.parts(layout, None)
        assert not isinstance(parts, int), "without a limit of the memory everything fits"
        return assemble(self.problem, layout.chains, layout.setting, layout.degrees, parts)
