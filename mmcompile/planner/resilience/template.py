"""`Template`: a pipeline for a number of nodes, not yet bound to any. A value: printable, comparable, JSON by msgspec."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mmcompile.units import columns, counted, format_seconds, span


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateStage:
    """Stage of a template: contiguous layers of one chain on devices of one node."""

    chain: str
    first: int
    last: int
    """End (excluded) of the stage's layers in the chain, which begin with `first` (included)."""
    devices: tuple[int, ...]
    """Devices by number within the pipeline, node * devices per node + device. Several devices share the stage's tensors."""
    seconds: float
    """Seconds of one microbatch's forward and backward, with the sends over the stage's cuts."""

    def __str__(self) -> str:
        devices = f"{self.devices[0]}" if len(self.devices) == 1 else f"{self.devices[0]}-{self.devices[-1]}"
        return f"{self.chain}[{self.first}:{self.last}]@{devices}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """Pipeline for a number of nodes: one replica of the model. A step of b microbatches takes `fill_s + b * slowest_s`."""

    num_nodes: int
    stages: tuple[TemplateStage, ...]
    """Stages in topological order: chains that feed others first, the loss stage last."""
    fill_s: float
    slowest_s: float
    """Seconds of forward and backward of the slowest stage for one microbatch."""
    gap: float = 0.0
    """Largest share of its time by which another pipeline of as many nodes could be faster; 0 for an optimum."""

    def iteration_s(self, num_microbatches: int) -> float:
        """Return the seconds of a step with a number of microbatches under 1F1B."""
        return self.fill_s + num_microbatches * self.slowest_s

    def __str__(self) -> str:
        """Return one line, for example `2 nodes: encoder[0:6]@0 lm[0:4]@1 lm[4:12]@2-3, slowest 1.20 ms`."""
        stages = " ".join(map(str, self.stages))
        proof = f", within {self.gap:.1%} of the fastest" if self.gap else ""
        return f"{counted(self.num_nodes, 'node')}: {stages}, slowest {format_seconds(self.slowest_s)}{proof}"


def format_templates(templates: Iterable[Template]) -> str:
    """Return a table with one line for each template: nodes, stages, devices of its stages, slowest stage, fill time."""
    rows = [("nodes", "stages", "devices a stage", "slowest", "fill", "gap")]
    for template in templates:
        rows.append(
            (
                str(template.num_nodes),
                str(len(template.stages)),
                span(len(stage.devices) for stage in template.stages),
                format_seconds(template.slowest_s),
                f"{template.fill_s * 1e3:.3g} ms",
                f"{template.gap:.1%}" if template.gap else "0",
            )
        )
    return "\n".join(columns(rows))
