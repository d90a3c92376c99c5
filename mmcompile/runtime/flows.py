"""A `Flow` and a `StepPlan` from prepared microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mmcompile.errors import BatchError, VerifyError
from mmcompile.ir.graph import dtype_name
from mmcompile.lower.program import PatternPrograms, PreparedMicrobatch
from mmcompile.plan.simulator.schedule import Flow, FlowEdge
from mmcompile.step.step_plan import MicrobatchPlan, StepPlan, ValueShape


def flow_of(programs: PatternPrograms, stages: Sequence[str]) -> Flow:
    """What a microbatch of a pattern does: its stages, edges and backwards, from the ports of its programs.

    Args:
        stages: all stages of the plan, in order.
    """
    present = [programs.programs[name] for name in stages if name in programs.programs]
    gradient: dict[tuple[str, str], bool] = {}
    for program in present:
        for port in program.inputs:
            if port.kind == "link":
                edge = (port.peers[0], program.stage)
                gradient[edge] = gradient.get(edge, False) or port.gradient
    return Flow(
        stages=tuple(program.stage for program in present),
        edges=tuple(FlowEdge(source=a, target=b, gradient=value) for (a, b), value in gradient.items()),
        backward=tuple(program.stage for program in present if program.has_backward),
    )


def step_plan(
    step: int,
    groups: Sequence[tuple[int, ...]],
    prepared: Sequence[PreparedMicrobatch],
    flows: Mapping[str, Flow],
) -> StepPlan:
    """Plan one step.

    Args:
        groups: per microbatch, the positions of its samples.
        prepared: per microbatch, its pattern and values.
        flows: by pattern.

    Raises:
        BatchError: no microbatch has a token to learn from.
    """
    num_samples = sum(map(len, groups))
    num_tokens = sum(_tokens(microbatch) for microbatch in prepared)
    if num_tokens == 0 and any(microbatch.programs.per_token for microbatch in prepared):
        raise BatchError(f"the step has no token to learn from: 0 valid labels in {num_samples} samples")
    return StepPlan(
        step=step,
        num_samples=num_samples,
        num_tokens=num_tokens,
        microbatches=tuple(
            MicrobatchPlan(
                index=index,
                samples=samples,
                pattern=microbatch.programs.pattern,
                sizes=dict(microbatch.sizes),
                flow=flows[microbatch.programs.pattern],
                roots=tuple(_shape(name, value) for name, value in microbatch.values.items()),
                links=_links(microbatch),
                loss_weight=_weight(microbatch, len(samples) / num_samples, num_tokens),
            )
            for index, (samples, microbatch) in enumerate(zip(groups, prepared, strict=True))
        ),
    )


def _tokens(microbatch: PreparedMicrobatch) -> int:
    if not microbatch.programs.per_token:
        return 0
    if microbatch.num_tokens is None:
        raise VerifyError(
            f"pattern {microbatch.programs.pattern} has a loss per token, but its tokens were not counted"
        )
    return microbatch.num_tokens


def _weight(microbatch: PreparedMicrobatch, share: float, num_tokens: int) -> float:
    """1 / the step's tokens, or the share of samples; 0 where nothing can be learned."""
    if microbatch.num_tokens == 0:
        return 0.0
    return 1 / num_tokens if microbatch.programs.per_token else share


def _links(microbatch: PreparedMicrobatch) -> tuple[ValueShape, ...]:
    dtypes = {
        port.name: port.dtype
        for program in microbatch.programs.programs.values()
        for port in program.outputs
        if port.peers
    }
    return tuple(
        ValueShape(name=name, shape=tuple(shape), dtype=dtypes[name]) for name, shape in microbatch.link_shapes.items()
    )


def _shape(name: str, value: Tensor) -> ValueShape:
    return ValueShape(name=name, shape=tuple(value.shape), dtype=dtype_name(value.dtype))
