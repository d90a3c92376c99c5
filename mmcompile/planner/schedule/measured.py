"""`measured_step`: a step to simulate, from measured seconds of layers, actions and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmcompile.costmodel.calibration import RuntimeCosts
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, Placed


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMessages:
    """Sizes of the messages from one stage to another for one microbatch."""

    source: str
    target: str
    sizes: tuple[int, ...]
    """Bytes of each tensor sent forward."""
    gradient_sizes: tuple[int, ...] = ()
    """Bytes of each gradient returned in the backward."""


def measured_step(
    stages: Sequence[Placed], times: Mapping[str, LayerTimes], messages: Sequence[LinkMessages], runtime: RuntimeCosts
) -> tuple[Flow, dict[str, LayerTimes], dict[tuple[str, str], float]]:
    """Return a simulation's inputs for a step of the runtime, in which every microbatch passes through every stage.

    Args:
        stages: stages, each placed on one rank.
        times: stage name -> seconds of its layers alone.
        messages: sizes of the messages between stages, those on the same rank included.
        runtime: measured seconds of actions and messages.

    Returns:
        Flow of a microbatch; durations of each stage with its part of the runtime; (sender, receiver) -> seconds of a message.
    """
    rank = {stage.name: stage.ranks[0] for stage in stages}
    crossing = [link for link in messages if rank[link.source] != rank[link.target]]
    flow = Flow(
        stages=tuple(rank),
        edges=tuple(
            FlowEdge(source=link.source, target=link.target, gradient=bool(link.gradient_sizes)) for link in messages
        ),
        backward=tuple(name for name, own in times.items() if own.backward_s > 0),
    )
    durations = {name: _duration(name, own, crossing, runtime) for name, own in times.items()}
    return flow, durations, _link_s(crossing, runtime)


def _duration(name: str, own: LayerTimes, crossing: Sequence[LinkMessages], runtime: RuntimeCosts) -> LayerTimes:
    forward = [size for link in crossing if name in (link.source, link.target) for size in link.sizes]
    backward = [size for link in crossing if name in (link.source, link.target) for size in link.gradient_sizes]
    has_backward = own.backward_s > 0
    return LayerTimes(
        forward_s=own.forward_s + runtime.forward_s + _handling_s(forward, runtime),
        input_grad_s=own.input_grad_s + (runtime.backward_s + _handling_s(backward, runtime)) * has_backward,
        weight_grad_s=own.weight_grad_s,
    )


def _handling_s(sizes: Sequence[int], runtime: RuntimeCosts) -> float:
    return len(sizes) * runtime.message_s + sum(sizes) * runtime.message_s_per_byte


def _link_s(crossing: Sequence[LinkMessages], runtime: RuntimeCosts) -> dict[tuple[str, str], float]:
    """Return (sender, receiver) -> seconds of a message in transit, without its copies by both ranks, counted in `_duration`."""
    sizes_of = {(link.source, link.target): link.sizes for link in crossing}
    sizes_of |= {(link.target, link.source): link.gradient_sizes for link in crossing}
    whole_s = {pair: runtime.link.latency_s + sum(sizes) / runtime.link.bytes_per_s for pair, sizes in sizes_of.items()}
    return {pair: max(0.0, whole_s[pair] - 2 * _handling_s(sizes, runtime)) for pair, sizes in sizes_of.items()}
