"""Trainable parameters of a captured model that get no gradient: found, described, and refused before training starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mmcompile.errors import ConfigError
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.gradient_flow import GradientFlow, GradientReport
from mmcompile.passes.pipeline import analyse
from mmcompile.units import format_bytes

_MAX_NAMES = 3
_OPTIMIZER_COPIES = 3
"""Bytes of a gradient and of AdamW's two states for each byte of the parameter, if all have the same dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UntrainedParameters:
    """Trainable parameters that get no gradient, as texts for the user."""

    what: str
    do: str
    """Action to take."""
    whole: bool
    """True if no parameter of the component, or of the model, gets a gradient."""

    def __str__(self) -> str:
        return f"{self.what}; {self.do}"


def untrained(
    graph: ModelGraph, report: GradientReport, dataset: str = "", absent: Collection[str] = ()
) -> Iterator[UntrainedParameters]:
    """Yield what is set to train and gets no gradient: whole components first, then single parameters.

    A model without a trainable parameter yields one entry for that.

    Args:
        dataset: name of the dataset that the model trains on, if there is one.
        absent: components for which no sample of the dataset has anything.
    """
    trainable = [spec for spec in graph.parameters if spec.trainable]
    if not trainable:
        what = "nothing trains: every parameter is frozen"
        yield UntrainedParameters(what=what, do="choose what trains with `train`", whole=True)
        return
    silent = {row.component: row.trainable for row in report.components if row.trainable and not row.receiving}
    for name, count in silent.items():
        yield UntrainedParameters(
            what=f"{name} is set to train, but no gradient reaches any of its {count} parameters",
            do="the loss does not depend on it through differentiable operations; freeze it, or mend the model",
            whole=True,
        )
    for row in report.components:
        if row.component in absent and row.receiving:
            yield UntrainedParameters(
                what=f"no sample of {dataset} has anything for {row.component}, "
                f"whose {row.trainable} parameters are set to train",
                do="check the dataset, or freeze it",
                whole=True,
            )
    layers = [layer for component in graph.components for layer in component.layers if component.name in silent]
    reported = {graph.specs[name].name for layer in layers for name in layer.parameters}
    unused = [spec for spec in trainable if spec.name in report.unused - reported]
    if unused:
        names = sorted(spec.name for spec in unused)
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        wasted = _OPTIMIZER_COPIES * sum(spec.num_bytes for spec in unused)
        yield UntrainedParameters(
            what=f"{len(names)} trainable parameters get no gradient: {', '.join(names[:_MAX_NAMES])}{more}",
            do=f"freeze them: their gradients and optimizer state could take {format_bytes(wasted)} for nothing",
            whole=False,
        )


def refuse_untrained(graph: ModelGraph) -> None:
    """Raise ConfigError, with names, if a parameter of a captured model is set to train and gets no gradient."""
    found = list(untrained(graph, analyse(GradientFlow(), graph)))
    if found:
        remedy = "freeze it (requires_grad_(False)), or give `allow_unused` to train the others"
        raise ConfigError("\n".join(("what is set to train would not train:", *map(str, found), remedy)))
