"""Jobs with templates for tests: even layers dealt to nodes, one stage a node, a step that grows with what a node holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mmcompile.plan.templates.job import Job
from mmcompile.plan.templates.template import Template, TemplateStage


def even_template(num_nodes: int, num_layers: int, *, chain: str = "language_model", layer_s: float = 1.0) -> Template:
    """One stage a node; nodes beyond the layers take none."""
    cuts = [round(node * num_layers / num_nodes) for node in range(num_nodes + 1)]
    stages = tuple(
        TemplateStage(chain=chain, first=first, last=last, devices=(node,), seconds=(last - first) * layer_s)
        for node, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False))
        if last > first
    )
    slowest_s = max(stage.seconds for stage in stages)
    return Template(
        num_nodes=num_nodes,
        stages=stages,
        fill_s=sum(stage.seconds for stage in stages) - slowest_s,
        slowest_s=slowest_s,
    )


def even_job(
    sizes: Sequence[int], *, fault_tolerance: int = 0, num_layers: int = 12, num_microbatches: int = 32
) -> Job:
    return Job(
        templates=tuple(even_template(size, num_layers) for size in sizes),
        devices_per_node=1,
        fault_tolerance=fault_tolerance,
        num_microbatches=num_microbatches,
        layer_bytes={"language_model": (100,) * num_layers},
    )


def timed_template(num_nodes: int, fill_s: float, slowest_s: float) -> Template:
    """Given times, layers as `even_template` of 12."""
    stages = even_template(num_nodes, 12).stages
    return Template(num_nodes=num_nodes, stages=stages, fill_s=fill_s, slowest_s=slowest_s)


def timed_job(templates: Sequence[Template], *, fault_tolerance: int = 0, num_microbatches: int = 8) -> Job:
    return Job(
        templates=tuple(templates),
        devices_per_node=1,
        fault_tolerance=fault_tolerance,
        num_microbatches=num_microbatches,
        layer_bytes={"language_model": (100,) * 12},
    )


def random_templates(rng: random.Random, sizes: Sequence[int]) -> tuple[Template, ...]:
    """Times that mostly, not always, fall with nodes."""
    return tuple(
        timed_template(size, rng.uniform(0, 3), rng.choice([1.0, rng.uniform(0.5, 4)]) / size**0.5) for size in sizes
    )
