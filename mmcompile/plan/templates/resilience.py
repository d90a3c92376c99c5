"""`Resilience`: what a plan has ready for the day nodes die."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmcompile.plan.templates.job import Job
from mmcompile.plan.templates.nodes import Cover
from mmcompile.plan.templates.template import Template, format_templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Resilience:
    """Templates of a plan, and the promise they keep. `str` is the part of the plan's table about it."""

    fault_tolerance: int
    """Nodes that may be lost at once without losing a layer."""
    templates: tuple[Template, ...]
    """One a node count, fewest nodes first."""
    num_nodes: int
    """Of the cluster."""
    devices_per_node: int
    num_microbatches: int
    """Of a step, over all pipelines, whatever their number."""
    layer_bytes: Mapping[str, tuple[int, ...]]
    """Chain -> parameters that train and optimizer state of each of its layers; 0 for what is frozen and needs no copy."""

    @property
    def job(self) -> Job:
        return Job(
            templates=self.templates,
            devices_per_node=self.devices_per_node,
            fault_tolerance=self.fault_tolerance,
            num_microbatches=self.num_microbatches,
            layer_bytes=self.layer_bytes,
        )

    @property
    def cover(self) -> Cover:
        """Which node counts can be used in full."""
        sizes = (template.num_nodes for template in self.templates)
        return Cover.of(sizes, self.num_nodes, self.fault_tolerance)

    def __str__(self) -> str:
        templates = format_templates({template.num_nodes: template for template in self.templates})
        return f"fault tolerance {self.fault_tolerance}: {self.cover}\n{templates}"
