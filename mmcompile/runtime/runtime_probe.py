"""`probe_runtime`: measured cost of a step beyond its layers. It runs a two-process pipeline that computes next to nothing."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmcompile.codegen.program import PatternPrograms, Port, PreparedMicrobatch, StageProgram
from mmcompile.costmodel.calibration import RuntimeCosts
from mmcompile.costmodel.cluster import Interconnect
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.data.collate import Sample, Value
from mmcompile.ir.graph import ParameterSpec
from mmcompile.planner.plan.placement import PlacedStage, Placement
from mmcompile.planner.schedule.measured import LinkMessages, measured_step
from mmcompile.planner.schedule.schedule import ActionKind, build_schedule
from mmcompile.planner.schedule.simulate import Event, simulate
from mmcompile.runtime.engine import DEFAULT_OPTIMIZER, Engine
from mmcompile.runtime.monitoring.timer import Timer, one_thread

_NUM_MICROBATCHES = 8
_NUM_STEPS = 15
_WARM_UP = 4
_SMALL = 64
"""Number of float32 elements of the probe's small message, whose transfer time is almost only the link's latency."""
_LARGE = 2**18
"""Number of float32 elements of the probe's large message: 1 MiB, about the size of messages between stages."""
_NUM_TENSORS = 8

_SCALE = """
class Stage(StageModule):
    def forward(self, x):
        return (self.t["scale"] * x,)
"""
_SUM = """
class Stage(StageModule):
    def forward(self, y):
        return ((y * self.t["weight"]).sum(),)
"""
_STAGES = ("scale", "sum")


class _ProbeSource:
    """Training program of the probe: one process scales a vector, and another process sums its elements."""

    def __init__(self, num_elements: int) -> None:
        self._num_elements = num_elements
        self._parameters = {"scale": torch.ones(num_elements), "weight": torch.ones(1)}
        for parameter in self._parameters.values():
            parameter.requires_grad_()
        root = Port(name="x", kind="root", shape=(1,), dtype="float32")
        programs = {
            "scale": self._program("scale", _SCALE, root, self._link("sum"), "scale"),
            "sum": self._program("sum", _SUM, self._link("scale"), _LOSS, "weight"),
        }
        self._programs = PatternPrograms(pattern=f"probe {num_elements}", programs=programs, per_token=False)

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def prepare(self, batch: Mapping[str, Value]) -> PreparedMicrobatch:
        values = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return PreparedMicrobatch(
            programs=self._programs, sizes={}, values={"x": values["x"]}, link_shapes={"y": (self._num_elements,)}
        )

    def _link(self, peer: str) -> Port:
        return Port(name="y", kind="link", shape=(self._num_elements,), dtype="float32", gradient=True, peers=(peer,))

    def _program(self, stage: str, source: str, argument: Port, result: Port, parameter: str) -> StageProgram:
        shape = tuple(self._parameters[parameter].shape)
        return StageProgram(
            stage=stage,
            pattern=f"probe {self._num_elements}",
            source=source,
            inputs=(argument,),
            outputs=(result,),
            parameters=(ParameterSpec(name=parameter, shape=shape, dtype="float32", trainable=True),),
            buffers=(),
            is_loss=stage == "sum",
            has_backward=True,
        )


_LOSS = Port(name="loss_sum", kind="link", shape=(), dtype="float32")


def probe_runtime(*, num_steps: int = _NUM_STEPS, device: str | None = "cpu") -> RuntimeCosts:
    """Measure what actions, messages and optimizer cost beyond the layers' computation, with two processes of this machine.

    Args:
        num_steps: number of steps of each measurement.
        device: as for the engine; None chooses CUDA if there is a GPU for each process.

    Raises:
        EngineError: the second process could not start.
    """
    with one_thread():
        small, large = (_measure(num_elements, num_steps, device) for num_elements in (_SMALL, _LARGE))
        per_byte, per_tensor = _optimizer_costs(torch.device("cpu" if device is None else device))
    num_bytes = (_LARGE - _SMALL) * torch.float32.itemsize
    costs = RuntimeCosts(
        forward_s=small.forward_s,
        backward_s=small.backward_s,
        message_s=small.send_s,
        message_s_per_byte=max(0.0, large.handling_s - small.handling_s) / num_bytes,
        step_s=0.0,
        optimizer_s_per_byte=per_byte,
        optimizer_s_per_tensor=per_tensor,
        optimizer=DEFAULT_OPTIMIZER.func.__name__,
        link=Interconnect(
            latency_s=small.message_s,
            # On a busy machine the difference can be lost in noise; latency is not nearly all of a large message.
            bytes_per_s=num_bytes / max(large.message_s - small.message_s, large.message_s / 10),
            source=f"measured between two processes of one machine, {_LARGE * 4 // 2**20} MiB messages",
        ),
    )
    return replace(costs, step_s=max(0.0, small.step_s - _empty_step_s(costs)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """Median seconds measured while two processes trained a pipeline of two stages that compute next to nothing."""

    step_s: float
    forward_s: float
    """Seconds of one stage's forward on one microbatch."""
    backward_s: float
    send_s: float
    message_s: float
    """Seconds between the start of a message's send and the end of its receive, if the receiver waited for the message."""
    handling_s: float
    """Processor seconds of rank 0 per message that it sends or receives, without the time of forwards and backwards."""


def _measure(num_elements: int, num_steps: int, device: str | None) -> _Probe:
    stages = tuple(PlacedStage(name=name, ranks=(i,), depth=1 - i) for i, name in enumerate(_STAGES))
    placement = Placement(stages=stages, num_microbatches=_NUM_MICROBATCHES)
    sample: Sample = {"x": torch.ones(1), "labels": torch.zeros(1, 1, dtype=torch.int64)}
    seconds: list[float] = []
    handling: list[float] = []
    events: list[Event] = []
    with Engine(placement, _ProbeSource(num_elements), device=device) as engine:
        for number in range(_WARM_UP + num_steps):
            before = _process_s()
            metrics = engine.step([sample] * _NUM_MICROBATCHES)
            used_s = _process_s() - before - metrics.busy_s[0]
            traced = engine.step([sample] * _NUM_MICROBATCHES, trace=True)
            assert traced.num_samples == _NUM_MICROBATCHES
            if number >= _WARM_UP:
                seconds.append(metrics.seconds)
                handling.append(used_s / (2 * _NUM_MICROBATCHES))
                events += engine.trace()
    return _Probe(
        step_s=statistics.median(seconds),
        forward_s=_median_s(events, ActionKind.F),
        backward_s=_median_s(events, ActionKind.B),
        send_s=_median_s(events, ActionKind.SEND_F, ActionKind.SEND_B),
        message_s=statistics.median(_travels(events)),
        handling_s=statistics.median(handling),
    )


def _process_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _median_s(events: Sequence[Event], *kinds: ActionKind) -> float:
    return statistics.median(event.end_s - event.start_s for event in events if event.kind in kinds)


def _travels(events: Sequence[Event]) -> list[float]:
    """Return the transfer time in seconds of each message that its receiver waited for.

    A transfer lasts from the start of the send to the end of the receive.
    """
    found: list[float] = []
    sent: dict[tuple[str, int], float] = {}
    for event in sorted(events, key=lambda event: event.start_s if event.kind.is_send else event.end_s):
        direction = event.kind.name.rpartition("_")[2], event.microbatch
        if event.kind.is_send:
            sent[direction] = event.start_s
        elif event.kind.is_receive and event.start_s < (start := sent.get(direction, 0.0)):
            found.append(event.end_s - start)
    return found


def _optimizer_costs(device: torch.device) -> tuple[float, float]:
    """Return two costs of the default optimizer's step: seconds per byte of parameters, and seconds per parameter tensor."""
    small, large = (_optimizer_s(size, device) for size in (_SMALL, _LARGE))
    per_byte = (large - small) / ((_LARGE - _SMALL) * torch.float32.itemsize)
    return max(0.0, per_byte), max(0.0, small - _SMALL * torch.float32.itemsize * per_byte)


def _optimizer_s(num_elements: int, device: torch.device) -> float:
    """Measure the default optimizer's step on float32 tensors of `num_elements` elements; return median seconds per tensor."""
    parameters = [nn.Parameter(torch.ones(num_elements, device=device)) for _ in range(_NUM_TENSORS)]
    optimizer, timer, seconds = DEFAULT_OPTIMIZER(parameters), Timer(device), []
    for _ in range(_WARM_UP + _NUM_STEPS):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        seconds.append(timer.run(optimizer.step)[0])
    return statistics.median(seconds[_WARM_UP:]) / _NUM_TENSORS


def _empty_step_s(costs: RuntimeCosts) -> float:
    stages = [PlacedStage(name=name, ranks=(i,), depth=1 - i) for i, name in enumerate(_STAGES)]
    message = LinkMessages(source=_STAGES[0], target=_STAGES[1], sizes=(4 * _SMALL,), gradient_sizes=(4 * _SMALL,))
    nothing = LayerTimes(forward_s=0.0, input_grad_s=1e-9, weight_grad_s=0.0)
    flow, durations, link_s = measured_step(stages, dict.fromkeys(_STAGES, nothing), [message], costs)
    return costs.step_s + simulate(build_schedule(stages, [flow] * _NUM_MICROBATCHES), durations, link_s).makespan_s
