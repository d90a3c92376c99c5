"""Jobs with templates for tests: even layers dealt to nodes, one stage a node, a step that grows with what a node holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.template import Template, TemplateStage


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


def two_chain_job(sizes: Sequence[int], *, fault_tolerance: int = 0, num_microbatches: int = 24) -> Job:
    """An encoder of 5 layers into a language model of 20, on nodes of two devices.

    The first node runs the encoder on one device and the language model begins on its other; all other nodes run two stages, or
    one on both devices. The encoder is frozen, so its first layer has no state.
    """
    templates = []
    for size in sizes:
        cuts = [round(index * 20 / (2 * size - 1)) for index in range(2 * size)]
        stages = [TemplateStage(chain="encoder", first=0, last=5, devices=(0,), seconds=0.5)]
        stages += [
            TemplateStage(
                chain="language_model", first=first, last=last, devices=(device,), seconds=(last - first) * 0.3
            )
            for device, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False), start=1)
        ]
        if size > 1:
            tail = TemplateStage(
                chain="language_model",
                first=stages[-2].first,
                last=20,
                devices=(2 * size - 2, 2 * size - 1),
                seconds=(20 - stages[-2].first) * 0.17,
            )
            stages[-2:] = [tail]
        slowest_s = max(stage.seconds for stage in stages)
        fill_s = sum(stage.seconds for stage in stages) - slowest_s
        templates.append(Template(num_nodes=size, stages=tuple(stages), fill_s=fill_s, slowest_s=slowest_s))
    return Job(
        templates=tuple(templates),
        devices_per_node=2,
        fault_tolerance=fault_tolerance,
        num_microbatches=num_microbatches,
        layer_bytes={"encoder": (0, 10, 10, 10, 40), "language_model": (500, *[100] * 18, 500)},
    )
