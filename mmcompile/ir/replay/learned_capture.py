"""`capture_learned`: one capture for all batches that call the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from mmcompile.ir.capture import Capture, capture_of
from mmcompile.ir.compat import mkldnn_flags, plain_checkpointing, transformers_eager_paths
from mmcompile.ir.functional import functionalize
from mmcompile.ir.gradient_proof import GradientPaths, gradient_paths
from mmcompile.ir.graph import Component
from mmcompile.ir.inputs import FlatBatch
from mmcompile.ir.known_values import KnownValues, known_values
from mmcompile.ir.replay.learning import LearnedTemplate, Learner, ReplayedHoles
from mmcompile.ir.replay.program import Program
from mmcompile.ir.trace import Trace, exported_graph, finished_trace, named_forward
from mmcompile.ir.tracing_context import no_python_randomness, python_state_kept, without_cache


def capture_learned(learner: Learner, learned: LearnedTemplate, reference: Sequence[Component] | None) -> Capture:
    """Capture what a model calls on its examples, with an input for everything in which they differ.

    Args:
        learner: learner of the model.
        learned: what it learned.
        reference: components of an earlier capture of this model, whose layer order is kept.

    Raises:
        CaptureError: the calls cannot be traced, or what was traced is not what the model calls.
    """
    program, batch = learner.program(learned), learned.example.batch
    dynamic = {name: tuple(sorted(dims)) for name, dims in learned.varying.items()}
    trace = _trace(program, batch, learned.given, dynamic)
    learner.check(learned, program)
    found = capture_of(program.model, batch, trace, {}, (), reference, learned.given)
    return replace(found, holes=ReplayedHoles(learner=learner, learned=learned))


def _trace(
    program: Program, batch: FlatBatch, given: Mapping[str, torch.Tensor], dynamic: Mapping[str, tuple[int, ...]]
) -> Trace:
    """Capture a program on the batch that its template was recorded on."""
    tensors = {name: value.detach() for name, value in {**batch, **given}.items() if isinstance(value, torch.Tensor)}
    with without_cache(program.model), python_state_kept(program.model):
        recorded: list[GradientPaths] = []
        module = exported_graph(_ProgramLoss(program, list(tensors), recorded.append), tensors, dynamic)
    functionalize(module.graph)
    for node in module.graph.find_nodes(op="placeholder"):
        if node.target in given:
            node.meta |= {"roots": frozenset((str(node.target),)), "from_integers": True}
    return finished_trace(module, tensors, recorded[-1])


class _ProgramLoss(nn.Module):
    """Wrapper module whose forward runs a program; it calls `on_trace` with the paths of its gradient."""

    def __init__(self, program: Program, names: list[str], on_trace: Callable[[GradientPaths], None]) -> None:
        super().__init__()
        self.model = program.model
        self._program = program
        self._on_trace = on_trace
        self.forward = named_forward(self._run, names)

    def _run(self, **inputs: torch.Tensor) -> torch.Tensor:
        with transformers_eager_paths(), plain_checkpointing(), mkldnn_flags(allow_tf32=None):  # noqa: SIM117
            with no_python_randomness(self.model), known_values(KnownValues()):
                loss = self._program.run(inputs)
        self._on_trace(gradient_paths(loss, dict(self.model.named_parameters())))
        return loss
