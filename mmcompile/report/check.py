"""Pre-flight check: problems and waste of time or memory when a model trains on a dataset by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.load import Load
from mmcompile.data.sample import SampleShape
from mmcompile.ir.graph import Component, ComponentKind
from mmcompile.passes.untrained import untrained
from mmcompile.planner.plan.bottlenecks import EVEN, TIGHT, memory_bytes, rank_loads, times_text
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Stage, uniform_mode
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing
from mmcompile.report.sample_loads import slot_samples
from mmcompile.report.study import Study
from mmcompile.units import counted, format_bytes, format_count, milliseconds

Severity = Literal["problem", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("problem", "warning", "note")
_MAX_NAMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fact that a user needs before training starts, with its severity and remedy."""

    severity: Severity
    what: str
    do: str = ""
    """Action to take; "" if there is none."""

    def __str__(self) -> str:
        return f"{self.severity:<8} {self.what}" + (f"; {self.do}" if self.do else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """All findings of a pre-flight check, the most severe first."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if no finding is a problem."""
        return all(finding.severity != "problem" for finding in self.findings)

    def __str__(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        total = ", ".join(counted(counts[name], name) for name in _ORDER if counts[name])
        return "\n".join([*map(str, self.findings), total or "nothing found"])


def check(study: Study, plan: Plan | None, refused: str = "") -> CheckReport:
    """Return the findings on training the model of `study` on its dataset by a plan; without a plan, `refused` is the reason."""
    found = [*_gradients(study), *_dataset(study)]
    if plan is None:
        found.append(Finding(severity="problem", what=f"no plan: {refused}"))
    else:
        found += [*_memory(study, plan), *_pace(plan)]
    return CheckReport(findings=tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity))))


def _gradients(study: Study) -> Iterator[Finding]:
    graph, report = study.graph, study.gradients
    stats, absent = study.workload.stats, study.workload.absent()
    for found in untrained(graph, report, "" if stats is None else stats.name, absent):
        yield Finding(severity="problem" if found.whole else "warning", what=found.what, do=found.do)
    rows = {row.component: row for row in report.components}
    for component in graph.components:
        row, names = rows[component.name], _parameters(component)
        own = [spec.num_elements for spec in graph.parameters if spec.name in names]
        if own and not row.trainable:
            passes = "gradient passes through it to what trains before" if row.carrying else "it runs forward only"
            what = f"{component.name} is frozen ({format_count(sum(own))} parameters): {passes}"
            yield Finding(severity="note", what=what)


def _parameters(component: Component) -> set[str]:
    return {name for layer in component.layers for name in layer.parameters}


def _dataset(study: Study) -> Iterator[Finding]:
    stats, workload = study.workload.stats, study.workload
    if stats is None:
        return
    trainable = {row.component: row.trainable for row in study.gradients.components}
    for name in workload.absent():
        if not trainable[name]:
            yield Finding(
                severity="warning",
                what=f"no sample of {stats.name} has anything for {name}, which never runs",
                do="check the dataset, or train a model without it",
            )
    for component in study.graph.components:
        without = sum(not _rows(study, component.name, shape) for shape in stats.samples) / len(stats.samples)
        if component.kind is ComponentKind.ENCODER and 0 < without < 1:
            yield Finding(severity="note", what=f"{without:.0%} of the samples have nothing for {component.name}")
    if stats.shares["text"] < 1:
        yield Finding(severity="note", what=f"{1 - stats.shares['text']:.0%} of the samples have no text of their own")
    yield from _too_long(study)


def _rows(study: Study, component: str, shape: SampleShape) -> float:
    return study.workload.loads([shape])[component].tokens


def _too_long(study: Study) -> Iterator[Finding]:
    stats, limit = study.workload.stats, study.max_positions
    component = study.graph.loss_component
    if stats is None or limit is None:
        return
    shapes = {shape.name: shape for shape in stats.heaviest()}.values()
    lengths = ((_rows(study, component, shape), shape) for shape in shapes)
    long = [item for item in lengths if item[0] > limit]
    if long:
        length, shape = max(long, key=lambda item: item[0])
        yield Finding(
            severity="problem",
            what=f"sample {shape.name} makes {length:.0f} tokens, {component} has positions for {limit}"
            + (f"; so do {len(long) - 1} more" if len(long) > 1 else ""),
            do="drop or shorten such samples, or use fewer patches an image",
        )


def _memory(study: Study, plan: Plan) -> Iterator[Finding]:
    limit = memory_bytes(plan)
    pricing = study.pricing(plan)
    needs: dict[str, int] = {}
    causes: dict[str, tuple[str, ...]] = {}
    for chain in plan.chains:
        worst = study.workload.worst(max(1.0, slot_samples(plan, study, chain)))
        for stage in chain.stages:
            needs[stage.name] = _stage_bytes(study, plan, chain, stage, pricing, worst.loads)
            causes[stage.name] = worst.samples[stage.segments[0].component]
    loads = [(sum(needs[stage.name] for stage in load.stages), load) for load in rank_loads(plan)]
    over = [(size, load) for size, load in loads if size > limit]
    for size, load in sorted(over, key=lambda item: -item[0])[:_MAX_NAMES]:
        worst_stage = max(load.stages, key=lambda stage: needs[stage.name])
        yield Finding(
            severity="problem",
            what=f"{_culprit(study, causes[worst_stage.name])}stage {load.name} needs {format_bytes(size)} of "
            f"{format_bytes(limit)}",
            do="recompute more, plan for smaller microbatches or more ranks a stage, or cap such samples",
        )
    if len(over) > _MAX_NAMES:
        yield Finding(severity="problem", what=f"{len(over) - _MAX_NAMES} more stages do not fit either")
    size, load = max(loads, key=lambda item: item[0])
    if not over:
        share = size / limit
        yield Finding(
            severity="warning" if share > TIGHT else "note",
            what=f"the heaviest microbatch fits: {load.name} needs most, {format_bytes(size)} of {format_bytes(limit)} "
            f"({share:.0%})",
            do="fragmentation may take the rest; leave more room" if share > TIGHT else "",
        )


def _stage_bytes(
    study: Study, plan: Plan, chain: Chain, stage: Stage, pricing: Pricing, worst: Mapping[str, Load]
) -> int:
    """Return a stage's peak bytes if one microbatch in flight has the loads `worst` (by component) and the others mean loads."""
    predicted = stage.prediction
    if not predicted.in_flight:
        return predicted.total_bytes
    modes, mixed = stage.modes, uniform_mode([stage]) == "mixed"
    heavy: list[LayerCost] = []
    for component, layer in stage.layers:
        mode = modes.get((component, layer), "none")
        sharding = LayerSharding(
            tp=chain.tp, cp=chain.cp, fsdp=chain.dp if chain.fsdp else 1, recompute=mode, mixed=mixed
        )
        heavy.append(pricing.costs(component, worst[component], sharding)[layer])
    held = predicted.fixed_bytes + (predicted.in_flight - 1) * predicted.saved_bytes
    return held + sum(cost.activation_bytes for cost in heavy) + max(cost.working_bytes for cost in heavy)


def _culprit(study: Study, samples: Sequence[str]) -> str:
    """Return text on the first named sample, with the number of others: `sample 10482 (31 images, ..) and 7 more like it`."""
    stats = study.workload.stats
    if stats is None or not samples:
        return "the example batch: "
    shape = next(shape for shape in stats.heaviest() if shape.name == samples[0])
    parts = [
        f"{counted(len(shape.images), 'image')}, {shape.patches} patches" if shape.images else "",
        f"{shape.frames} audio frames" if shape.audios else "",
        f"{shape.text_tokens} text tokens" if shape.text_tokens else "",
    ]
    more = f" and {len(samples) - 1} more like it" if len(samples) > 1 else ""
    return f"sample {shape.name} ({', '.join(filter(None, parts))}){more} in one microbatch: "


def _pace(plan: Plan) -> Iterator[Finding]:
    loads = rank_loads(plan)
    slowest = max(loads, key=lambda load: load.seconds)
    others = [load.seconds for load in loads if load is not slowest]
    if others:
        mean_s = sum(others) / len(others)
        ratio = slowest.seconds / mean_s if mean_s else 1.0
        straggles = ratio > 1 + EVEN
        time = f"{milliseconds(slowest.seconds)} ms a microbatch, {times_text(ratio)} the mean of the others"
        yield Finding(
            severity="note",
            what=f"the straggler is {slowest.name}: {time}"
            if straggles
            else f"no straggler: the slowest stage, {slowest.name}, is within {EVEN:.0%} of the others",
            do="`mmcompile explain` says why, and what a move would change" if straggles else "",
        )
    idle, devices = plan.cluster.num_devices - len({r for s in plan.stages for r in s.ranks}), plan.cluster.num_devices
    if idle > 0:
        yield Finding(severity="note", what=f"{idle} of {devices} devices have no work")
