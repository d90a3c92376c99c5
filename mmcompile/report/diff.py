"""Differences between two plans: settings, layout of each chain, layers that moved, times and memory, templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from mmcompile.planner.plan.bottlenecks import rank_loads
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Stage
from mmcompile.planner.plan.stage_rows import recompute_text
from mmcompile.planner.resilience.resilience import figures
from mmcompile.planner.resilience.template import Template
from mmcompile.units import counted, format_bytes, format_seconds, labelled

Unit = Literal["s", "bytes", "share", ""]
_EQUAL = 1e-9
"""Relative difference below which numbers of two compared plans count as equal."""
_MAX_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedSetting:
    """A setting that differs between two plans; "-" for a plan that lacks it."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A predicted number that differs between two plans."""

    name: str
    before: float
    after: float
    unit: Unit

    @property
    def change(self) -> float | None:
        """Relative change; for shares, the difference; None if the number was 0 before."""
        if self.unit == "share":
            return self.after - self.before
        return self.after / self.before - 1 if self.before else None

    def __str__(self) -> str:
        change = self.change
        by = "" if change is None else f" ({change * 100:+.1f}{' points' if self.unit == 'share' else '%'})"
        return f"{self.name} {_value(self.before, self.unit)} -> {_value(self.after, self.unit)}{by}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChange:
    """Predicted numbers of one stage that differ between two plans."""

    stage: str
    figures: tuple[Figure, ...]

    def __str__(self) -> str:
        return f"{self.stage}: {', '.join(map(str, self.figures))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMove:
    """Layers `first` to `last` (included) of a component that went from one stage to another."""

    component: str
    first: int
    last: int
    before: str
    after: str

    def __str__(self) -> str:
        layers = f"layer {self.first}" if self.first == self.last else f"layers {self.first}..{self.last}"
        return f"{self.component} {layers}: {self.before} -> {self.after}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDiff:
    """Differences between two plans; empty if no number or setting differs."""

    settings: tuple[ChangedSetting, ...]
    layout: tuple[ChangedSetting, ...]
    """Degrees and stage counts of chains."""
    figures: tuple[Figure, ...]
    """Predicted numbers of the whole plan."""
    moved: tuple[LayerMove, ...]
    stages: tuple[StageChange, ...]
    """Stages that are in both plans, each with the numbers (layers, seconds, bytes) that differ."""
    templates: tuple[ChangedSetting, ...] = ()
    """Fault tolerance, usable node counts, and templates by node count."""

    @property
    def is_empty(self) -> bool:
        """True if the plans do not differ."""
        return not any(getattr(self, section.name) for section in fields(self))

    def __str__(self) -> str:
        if self.is_empty:
            return "no difference"
        lines: list[str] = []
        for section in fields(self):
            rows: tuple[object, ...] = getattr(self, section.name)
            left = [f"and {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []
            lines += labelled(section.name, [*rows[:_MAX_ROWS], *left], 10)
        return "\n".join(lines)


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """Return the differences between two plans, usually of the same model."""
    return PlanDiff(
        settings=tuple(_changed(_settings(before), _settings(after))),
        layout=tuple(_changed(_layout(before), _layout(after))),
        figures=tuple(_differing(_figures(before), _figures(after))),
        moved=tuple(_moved(before, after)),
        stages=tuple(_stages(before, after)),
        templates=tuple(_templates(before, after)),
    )


def _settings(plan: Plan) -> dict[str, str]:
    found = {
        "model": plan.fingerprint.model,
        "parameters": plan.fingerprint.parameters[:12],
        "torch": plan.fingerprint.torch,
        "transformers": plan.fingerprint.transformers,
        "cluster": str(plan.cluster),
        "microbatches": str(plan.num_microbatches),
        "schedule": plan.schedule,
        "recompute": recompute_text(plan.stages),
        "attention": plan.attention,
        "strategy": plan.strategy,
        "data": plan.data or "the example batch",
        "costs": plan.costs,
    }
    return found | ({"global batch": str(plan.global_batch)} if plan.global_batch else {})


def _layout(plan: Plan) -> dict[str, str]:
    return {chain.name: _degrees(chain) for chain in plan.chains}


def _degrees(chain: Chain) -> str:
    ranks = counted(len({rank for stage in chain.stages for rank in stage.ranks}), "rank")
    return f"tp {chain.tp} cp {chain.cp} pp {len(chain.stages)} dp {chain.dp} on {ranks}"


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[ChangedSetting]:
    for name in dict.fromkeys((*before, *after)):
        one, two = before.get(name, "-"), after.get(name, "-")
        if one != two:
            yield ChangedSetting(name=name, before=one, after=two)


def _figures(plan: Plan) -> dict[str, tuple[float, Unit]]:
    loads = rank_loads(plan)
    predicted = plan.predicted
    return {
        "iteration": (predicted.iteration_s, "s"),
        "bubble": (predicted.bubble, "share"),
        "lower bound": (predicted.lower_bound_s, "s"),
        "gap": (predicted.gap, "share"),
        "slowest rank": (max(load.seconds for load in loads), "s"),
        "fullest rank": (max(load.num_bytes for load in loads), "bytes"),
        "ranks": (len({rank for stage in plan.stages for rank in stage.ranks}), ""),
    }


def _differing(before: Mapping[str, tuple[float, Unit]], after: Mapping[str, tuple[float, Unit]]) -> Iterator[Figure]:
    for name, (one, unit) in before.items():
        two = after[name][0]
        if abs(one - two) > _EQUAL * max(abs(one), abs(two)):
            yield Figure(name=name, before=one, after=two, unit=unit)


def _stages(before: Plan, after: Plan) -> Iterator[StageChange]:
    others = {stage.name: stage for stage in after.stages}
    for stage in before.stages:
        if stage.name in others:
            figures = tuple(_differing(_stage_figures(stage), _stage_figures(others[stage.name])))
            if figures:
                yield StageChange(stage=stage.name, figures=figures)


def _stage_figures(stage: Stage) -> dict[str, tuple[float, Unit]]:
    predicted = stage.prediction
    return {
        "layers": (len(stage.layer_names), ""),
        "forward": (predicted.forward_s, "s"),
        "backward": (predicted.times.backward_s, "s"),
        "memory": (predicted.total_bytes, "bytes"),
    }


def _templates(before: Plan, after: Plan) -> Iterator[ChangedSetting]:
    yield from _changed(_promise(before), _promise(after))
    one, two = _by_size(before), _by_size(after)
    for size in sorted(one.keys() | two.keys()):
        name = counted(size, "node")
        yield from _changed({name: _words(one.get(size), two.get(size))}, {name: _words(two.get(size), one.get(size))})


def _promise(plan: Plan) -> dict[str, str]:
    if plan.resilience is None:
        return {}
    return {
        "fault tolerance": str(plan.resilience.fault_tolerance),
        "nodes": str(plan.resilience.cover),
        "microbatches of all pipelines": str(plan.resilience.num_microbatches),
        "state to copy": format_bytes(sum(map(sum, plan.resilience.layer_bytes.values()))),
    }


def _by_size(plan: Plan) -> dict[int, Template]:
    return {} if plan.resilience is None else {template.num_nodes: template for template in plan.resilience.templates}


def _words(template: Template | None, other: Template | None) -> str:
    """Return a template's numbers as text, "-" for None. If `other` has the same numbers, the first differing stage follows."""
    if template is None:
        return "-"
    if other is None or figures(template) != figures(other):
        return figures(template)
    pairs = zip(template.stages, other.stages, strict=True)
    stage = next((str(own) for own, others in pairs if str(own) != str(others)), "")
    return f"{figures(template)}: {stage}" if stage else figures(template)


def _moved(before: Plan, after: Plan) -> list[LayerMove]:
    """Return the layers whose stage differs between two plans; consecutive layers with the same two stages are one move."""
    homes, goals = ({layer: own.name for own in plan.stages for layer in own.layers} for plan in (before, after))
    moves: list[LayerMove] = []
    for (component, layer), home in homes.items():
        goal = goals.get((component, layer), home)
        if goal != home:
            move = LayerMove(component=component, first=layer, last=layer, before=home, after=goal)
            if moves and moves[-1] == replace(move, first=moves[-1].first, last=layer - 1):
                move = replace(move, first=moves.pop().first)
            moves.append(move)
    return moves


def _value(value: float, unit: Unit) -> str:
    match unit:
        case "s":
            return format_seconds(value)
        case "bytes":
            return format_bytes(value)
        case "share":
            return f"{value:.1%}"
        case _:
            return f"{value:g}"
