"""`profile`: measure the layers of a model on the device at hand, one of each kind, and fit their seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.codegen.layer_program import LayerProgram, Place, layer_programs, real, shared_values
from mmcompile.codegen.load import load_stage
from mmcompile.costmodel.calibration import Calibration, HostCosts, KindCosts, Measurement, fit_polynomial, installed
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.costmodel.load import Load
from mmcompile.data.collate import collate
from mmcompile.errors import ConfigError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph, info, torch_dtype
from mmcompile.ir.host_shapes import attribute
from mmcompile.ir.inputs import completed
from mmcompile.passes.capture_pipeline import annotated
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.passes.pipeline import analyse
from mmcompile.runtime.monitoring.timer import Timer, one_thread, processor_name

_WARM_UP = 1
ROUNDS = 4
"""Default number of rounds of a measurement, whose median is taken."""
_IN_FLIGHT = 4
"""Number of forwards measured before the first backward: as in a pipeline stage, activations have then left the cache."""
CPU_SIZES = (64, 256, 1024)
GPU_SIZES = (64, 256, 1024, 4096, 16384)
"""Default numbers of tokens of GPU measurements (Entrain section 4.4)."""

Progress = Callable[[str, float], None]
"""Callback that receives the name of the next measurement, and the fraction done, 0..1."""


def profile(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    *,
    device_name: str,
    device: torch.device | str = "cpu",
    rounds: int = ROUNDS,
    on_progress: Progress = lambda text, share: None,
) -> Calibration:
    """Measure one layer of each kind at the load of every batch.

    Forward and backward are timed; as in the engine, the backward adds to gradients that exist already. The input gradient is
    timed alone; the weight gradient is the rest of the backward. Weights and activations are random, so the model's may be fake;
    masks, positions and sequence lengths are those of the batch. All runs in one thread, as a rank does on a CPU.

    Args:
        model: model with the `requires_grad` flags it will train with.
        batches: microbatches of different sizes, all with every modality.
        device_name: name of the device in clusters.
        on_progress: called before each measurement.

    Raises:
        BatchError, CaptureError: from the captures.
        ConfigError: no batches.
    """
    if not batches:
        raise ConfigError("there is nothing to measure: pass at least one batch")
    where = torch.device(device)
    points: dict[str, list[Measurement]] = {}
    layers: dict[str, str] = {}
    hosts: list[tuple[Load, float]] = []
    graph: ModelGraph | None = None
    with one_thread():
        for number, batch in enumerate(batches):
            name, done = f"batch {number + 1} of {len(batches)}", number / len(batches)
            on_progress(f"capturing {name}", done)
            subject = _MeasuredModel.of(model, batch)
            graph = subject.graph
            hosts.append((subject.loads[graph.loss_component], subject.host_s(model, batch, rounds)))
            for index, (kind, place) in enumerate(subject.kinds.items()):
                layer = graph.component(place[0]).layers[place[1]].name
                on_progress(f"{layer}, {name}", done + index / len(subject.kinds) / len(batches))
                if place in subject.programs:
                    times = subject.measure(place, where, rounds)
                    layers.setdefault(kind, layer)
                    points.setdefault(kind, []).append(Measurement(load=subject.loads[place[0]], times=times))
    assert graph is not None
    host = HostCosts(
        model=graph.name, seconds=fit_polynomial([load for load, _ in hosts], [seconds for _, seconds in hosts])
    )
    return Calibration(
        device=device_name,
        processor=processor_name(where),
        dtype=graph.main_dtype,
        torch=installed("torch"),
        mmcompile=installed("mmcompile"),
        kinds=tuple(KindCosts.fitted(kind, layers[kind], measured) for kind, measured in points.items()),
        hosts=(host,),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeasuredModel:
    """A model captured on one batch, ready to be measured layer by layer."""

    captured: Capture = field(repr=False)
    inputs: Mapping[str, Tensor] = field(repr=False)
    """Name of each placeholder (input) of the captured graph -> its value in the batch."""
    loads: Mapping[str, Load]
    kinds: Mapping[str, Place]
    """Layer kind -> the first layer of that kind."""
    programs: Mapping[Place, LayerProgram] = field(repr=False)

    @property
    def graph(self) -> ModelGraph:
        return self.captured.graph

    @classmethod
    def of(cls, model: nn.Module, batch: Mapping[str, Any]) -> _MeasuredModel:
        batch = completed(model, batch)
        captured = annotated(capture(model, batch))
        kinds: dict[str, Place] = {}
        for component, own in layer_kinds(captured.graph).items():
            for layer, kind in enumerate(own):
                kinds.setdefault(kind, (component, layer))
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return cls(
            captured=captured,
            inputs={**tensors, **captured.host.run(tensors).values},
            loads=analyse(Cost(), captured.graph).loads,
            kinds=kinds,
            programs=layer_programs(captured.graph, kinds.values()),
        )

    def host_s(self, model: nn.Module, batch: Mapping[str, Any], rounds: int) -> float:
        """Return the median seconds, over `rounds` runs, in which the CPU prepares a microbatch from the samples in `batch`."""

        def prepare() -> None:
            made = completed(model, collate([batch], None))
            tensors = {name: value for name, value in made.items() if isinstance(value, Tensor)}
            self.captured.sizes.bind(tensors)
            self.captured.host.run(tensors)

        timer = Timer(torch.device("cpu"))
        return statistics.median([timer.run(prepare)[0] for _ in range(_WARM_UP + rounds)][_WARM_UP:])

    def measure(self, place: Place, device: torch.device, rounds: int) -> LayerTimes:
        """Return the median seconds, over `rounds` rounds, of a layer's forward, input gradient and weight gradient."""
        run = _LayerRun.of(self, self.programs[place], device)
        timer = Timer(device)
        forward: list[float] = []
        whole: list[float] = []
        inputs: list[float] = []
        for number in range(_WARM_UP + rounds):
            kept = [timer.run(run.forward) for _ in range(_IN_FLIGHT)]
            backward = [timer.run(lambda r=r: run.backward(r))[0] for _, r in reversed(kept) if run.seeds]
            if number >= _WARM_UP:
                forward += [seconds for seconds, _ in kept]
                whole += backward
            if run.leaves and run.parameters:
                again = [run.forward() for _ in range(_IN_FLIGHT)]
                alone = [timer.run(lambda r=r: run.input_grad(r))[0] for r in reversed(again)]
                inputs += alone if number >= _WARM_UP else []
        whole_s = statistics.median(whole or [0.0])
        input_s = statistics.median(inputs) if inputs else whole_s * bool(run.leaves)
        return LayerTimes(
            forward_s=statistics.median(forward),
            input_grad_s=min(input_s, whole_s),
            weight_grad_s=max(whole_s - input_s, 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerRun:
    """A layer loaded on a device with its arguments, ready for repeated forward and backward."""

    module: nn.Module
    arguments: Sequence[Tensor]
    leaves: Sequence[Tensor]
    """Arguments that receive a gradient."""
    parameters: Sequence[nn.Parameter]
    """Parameters of the layer that train."""
    roots: Sequence[int]
    """Indices of the layer's results from which the backward starts."""
    seeds: Sequence[Tensor]
    """Gradients from which the backward starts, one for each of `roots`; () for a layer that only runs forward."""

    @classmethod
    def of(cls, subject: _MeasuredModel, layer: LayerProgram, device: torch.device) -> _LayerRun:
        program = layer.program
        tensors = {spec.name: _weights(spec.shape, torch_dtype(spec.dtype), device) for spec in program.parameters}
        tensors |= {name: real(attribute(subject.graph.module, name)).to(device) for name in program.buffers}
        module = load_stage(program, tensors, device)
        module.c = {name: tensor.to(device) for name, tensor in module.c.items()}
        arguments = _arguments(subject, layer, device)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with torch.set_grad_enabled(program.has_backward):
            results = module(*arguments)
        roots = [index for index, value in enumerate(results) if program.has_backward and value.requires_grad]
        for parameter in parameters if roots else ():
            parameter.grad = torch.zeros_like(parameter)
        return cls(
            module=module,
            arguments=arguments,
            leaves=[argument for argument in arguments if argument.requires_grad],
            parameters=parameters,
            roots=roots,
            seeds=[torch.ones_like(results[index]) for index in roots],
        )

    def forward(self) -> list[Tensor]:
        with torch.set_grad_enabled(bool(self.seeds)):
            results = self.module(*self.arguments)
        return [results[index] for index in self.roots]

    def backward(self, roots: Sequence[Tensor]) -> None:
        torch.autograd.backward(roots, self.seeds)
        for leaf in self.leaves:
            leaf.grad = None

    def input_grad(self, roots: Sequence[Tensor]) -> None:
        torch.autograd.grad(roots, self.leaves, self.seeds, allow_unused=True)


def _weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=device)
    # Activations keep a magnitude near 1.
    return torch.randn(shape, dtype=dtype, device=device) / shape[-1] ** 0.5


def _arguments(subject: _MeasuredModel, layer: LayerProgram, device: torch.device) -> list[Tensor]:
    """Return the tensors to call a layer with: batch inputs and shared values as captured, random ones for other results."""
    shared = [node for node in layer.arguments if node.op == "call_function" and info(node).shared]
    known = shared_values(subject.graph, shared, subject.inputs)
    arguments: list[Tensor] = []
    for node, port in zip(layer.arguments, layer.program.inputs, strict=True):
        if node.op == "placeholder":
            value = subject.inputs[port.name]
        elif node in known:
            value = known[node]
        else:
            value = torch.zeros(tuple(node.meta["val"].shape), dtype=torch_dtype(port.dtype))
            value = value.normal_() if value.is_floating_point() else value
        arguments.append(value.to(device).detach().requires_grad_(port.gradient))
    return arguments
