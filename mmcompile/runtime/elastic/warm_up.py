"""`warm_up`: compile every distinct layer before workers are forked, so that none of them compiles anything.

Processes forked afterwards have the code. Conditions that would cause a recompilation are the same as in the workers: one thread,
gradients where the executor has them, and inputs of the layout that `CompiledLayers` gives all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from mmcompile.codegen.canonical import canonical_layers
from mmcompile.codegen.compiled import load_compiled_stage
from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import Port, PreparedMicrobatch, StageProgram
from mmcompile.ir.graph import torch_dtype
from mmcompile.runtime.monitoring.timer import one_thread

_CPU = torch.device("cpu")
_RUNS = 2
"""Number of runs of a layer whose tensor sizes vary: one that compiles it, and one with other sizes, which may compile again."""


def warm_up(
    microbatches: Iterable[PreparedMicrobatch], parameters: Mapping[str, Tensor], *, backend: str = "inductor"
) -> int:
    """Compile the distinct layers of microbatches by running each forward and backward, one at a time.

    Returns the number of compiled graphs; a forward and its backward are one graph.

    A layer gets the microbatch's own inputs, and random values for the results of other layers; the run takes the memory of one
    layer. Parameters and the random number generator are unchanged. No thread or process is left behind.

    Args:
        microbatches: at least one of every pattern that workers are to find compiled.

    Raises:
        VerifyError: a program is not as `stage_source` writes it, or a tensor is missing.
    """
    before = num_graphs()
    tensors = {name: tensor.detach().cpu() for name, tensor in parameters.items()}
    runs: dict[tuple[str, ...], set[tuple[object, ...]]] = {}
    with _alone(), one_thread(), torch.random.fork_rng(devices=[]):
        for microbatch in microbatches:
            values = _Values(microbatch, tensors)
            for program in microbatch.programs.programs.values():
                layers = canonical_layers(program.source, program.stage).values()
                done = runs.setdefault(tuple(layer.text for layer in layers), set())
                sizes = values.sizes(program)
                if sizes not in done and len(done) < _RUNS:
                    done.add(sizes)
                    _run(program, values, backend)
    return num_graphs() - before


def num_graphs() -> int:
    """Return the number of graphs that this process, and those it was forked from, have compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]  # pyright: ignore[reportPrivateUsage]


class _Values:
    """Makes inputs and parameters to run the programs of one microbatch with, which compiles the programs."""

    def __init__(self, microbatch: PreparedMicrobatch, tensors: Mapping[str, Tensor]) -> None:
        self._microbatch = microbatch
        self._tensors = tensors
        self._known: dict[str, Tensor] = {}
        """Values sent between stages that are not random (integers, masks), by name."""

    def sizes(self, program: StageProgram) -> tuple[object, ...]:
        return tuple(
            self._microbatch.sizes[port.name] if port.kind == "size" else self._shape(port) for port in program.inputs
        )

    def inputs(self, program: StageProgram, *, gradient: bool) -> list[Tensor | int]:
        return [
            self._microbatch.sizes[port.name]
            if port.kind == "size"
            else self._tensor(port).requires_grad_(gradient and port.gradient)
            for port in program.inputs
        ]

    def held(self, program: StageProgram) -> tuple[StageProgram, dict[str, Tensor]]:
        names = [spec.name for spec in program.parameters] + list(program.buffers)
        constants = {name: tensor.cpu() for name, tensor in program.constants.items()}
        return replace(program, constants=constants), {name: self._tensors[name] for name in names}

    def _shape(self, port: Port) -> tuple[int, ...]:
        if port.kind == "link":
            return self._microbatch.link_shapes[port.name]
        return tuple(self._microbatch.values[port.name].shape)

    def _tensor(self, port: Port) -> Tensor:
        if port.kind != "link":
            # Detached: a value without gradient stays so in the microbatch.
            return self._microbatch.values[port.name].cpu().detach()
        dtype = torch_dtype(port.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(self._shape(port), dtype=dtype)
        if port.name not in self._known:
            # Random positions and masks would make no sense to who reads them.
            self._make(self._microbatch.programs.programs[port.peers[0]])
        return self._known[port.name].detach()

    def _make(self, program: StageProgram) -> None:
        """Run a program, and store its integer and boolean results for other programs: random indices would be invalid."""
        with torch.no_grad():
            results = load_stage(*self.held(program), _CPU)(*self.inputs(program, gradient=False))
        for port, value in zip(program.outputs, results, strict=True):
            if not (value.is_floating_point() or value.is_complex()):
                self._known[port.name] = value


def _run(program: StageProgram, values: _Values, backend: str) -> None:
    stage = load_compiled_stage(*values.held(program), _CPU, backend=backend)
    inputs = values.inputs(program, gradient=program.has_backward)
    with torch.set_grad_enabled(program.has_backward):
        results, _ = stage.run_deferring(*inputs)
    wanted = [
        value
        for port, value in zip(program.outputs, results, strict=True)
        if value.requires_grad and (port.gradient or not port.peers)
    ]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(value) for value in wanted])


@contextlib.contextmanager
def _alone() -> Generator[None]:
    """Return a context in which torch compiles in this thread alone: other threads would not exist in forked processes."""
    # torch's interpreters make progress bars, hidden ones too, and the first bar starts a thread that watches all.
    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0
    try:
        # Reached through torch, which loads it at its first use: an import would take a second of every `import mmcompile`.
        with torch._inductor.config.patch(compile_threads=1):  # pyright: ignore
            yield
    finally:
        tqdm.monitor_interval = interval
