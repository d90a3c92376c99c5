"""`Resilience`: the pipeline templates of a plan for failures of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.nodes import Cover, fewest_pipelines
from mmcompile.planner.resilience.template import Template, format_templates
from mmcompile.units import counted, format_seconds, span


@dataclass(frozen=True, kw_only=True, slots=True)
class Resilience:
    """Templates of a plan, and the fault tolerance that they give. `str` shows all of it, `rows` what fits a plan's table."""

    fault_tolerance: int
    """Number of nodes that may be lost at once without losing a layer."""
    templates: tuple[Template, ...]
    """One template for each node count, fewest nodes first."""
    num_nodes: int
    """Number of nodes of the whole cluster."""
    devices_per_node: int
    num_microbatches: int
    """Number of microbatches of a step over all pipelines; the same for any number of pipelines."""
    layer_bytes: Mapping[str, tuple[int, ...]]
    """Chain -> bytes of trainable parameters and optimizer state of each layer; 0 for a frozen layer, which needs no copy."""
    microbatch_samples: float = 1.0
    """Mean number of samples of a microbatch."""

    @property
    def job(self) -> Job:
        """Templates, batch and fault tolerance as a `Job`, which stays the same while nodes come and go."""
        return Job(
            templates=self.templates,
            devices_per_node=self.devices_per_node,
            fault_tolerance=self.fault_tolerance,
            num_microbatches=self.num_microbatches,
            layer_bytes=self.layer_bytes,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Node counts of the templates, ascending."""
        return tuple(template.num_nodes for template in self.templates)

    @property
    def cover(self) -> Cover:
        """Node counts that can be used in full with at most as many pipelines as a step has microbatches."""
        return Cover.of(self.sizes, self.num_nodes, self.fault_tolerance, max_pipelines=self.num_microbatches)

    @property
    def promise(self) -> str:
        """Sentence, for example `fault tolerance 1: any 4..16 nodes can be used in full; below 4 training stops`."""
        return f"fault tolerance {self.fault_tolerance}: {self.cover}"

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why node counts cannot be used in full, with remedies; () if all can."""
        found: list[str] = []
        try:
            Cover.of(self.sizes, self.num_nodes, self.fault_tolerance).check()
        except PlanError as error:
            found.append(str(error))
        fewest = fewest_pipelines(self.sizes, self.num_nodes, self.fault_tolerance + 1)
        needed = max(fewest.values())
        if needed > self.num_microbatches:
            found.append(
                f"a step has {self.num_microbatches} microbatches, one at least for each pipeline, too few to use every number "
                f"of nodes in full; {needed} would do"
            )
        return tuple(found)

    def rows(self, most: int) -> list[str]:
        """Return at most `most` lines about the templates: one for each, or for a selection, or one line for all."""
        templates = self.templates
        if most >= len(templates):
            return [_row(template) for template in templates]
        if most < 2:
            first, last = templates[0], templates[-1]
            sizes = f"{first.num_nodes}..{last.num_nodes} nodes ({len(templates)} sizes)"
            slowest = f"{format_seconds(first.slowest_s)} down to {format_seconds(last.slowest_s)}"
            return [f"{sizes}: {_stages(templates)}, slowest {slowest}"] * most
        chosen = [round(index * (len(templates) - 1) / (most - 1)) for index in range(most)]
        rows = [_row(templates[index]) for index in chosen]
        rows[-1] += f" (and {len(templates) - most} sizes between)"
        return rows

    def __str__(self) -> str:
        return f"{self.promise}\n{format_templates(self.templates)}"


def figures(template: Template) -> str:
    """Return text on a template in numbers, for example `12 stages of 1..4 devices, slowest 1.20 ms, 8.40 ms to fill`."""
    proof = f", within {template.gap:.1%} of the fastest" if template.gap else ""
    times = f"slowest {format_seconds(template.slowest_s)}, {format_seconds(template.fill_s)} to fill"
    return f"{_stages([template])}, {times}{proof}"


def _row(template: Template) -> str:
    return f"{counted(template.num_nodes, 'node')}: {figures(template)}"


def _stages(templates: Sequence[Template]) -> str:
    """Return the numbers of stages, and of devices of a stage, in templates as text: `12 stages of 1..4 devices`."""
    counts = span(len(template.stages) for template in templates)
    widths = span(len(stage.devices) for template in templates for stage in template.stages)
    return f"{counts} stage{'s' * (counts != '1')} of {widths} device{'s' * (widths != '1')}"
