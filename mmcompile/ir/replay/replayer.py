"""`Replayer`: runs a model's forward with fake parameters and fake float inputs, but real integers."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.ir.compat import (
    FakeTensor,
    FakeTensorMode,
    fake_mode_of,
    has_hooks,
    mkldnn_flags,
    no_torch_functions,
    plain_checkpointing,
    transformers_eager_paths,
)
from mmcompile.ir.gradient_proof import gradient_paths
from mmcompile.ir.implementations import packed_towers, traceable_experts
from mmcompile.ir.inputs import FlatBatch
from mmcompile.ir.losses import loss_of
from mmcompile.ir.replay.program import Program, ResultShapes
from mmcompile.ir.replay.recorder import ModuleRule, Recorder
from mmcompile.ir.replay.script import Script
from mmcompile.ir.replay.values import Value, ValueKind, rebuild
from mmcompile.ir.tracing_context import no_python_randomness, python_state_kept, without_cache


class Replayer:
    """Runs the Python of a copy of a model, without its weights.

    Args:
        model: any module, real or fake; not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mode = fake_mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.allow_non_fake_inputs = True
        made: dict[int, Any] = {}
        for parameter in model.parameters():
            fake = self.mode.from_tensor(parameter.detach(), static_shapes=True)
            made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        self._keep = list(model.parameters())
        self.model = copy.deepcopy(model, made)
        self._recorder: Recorder | None = None
        for path, module in self.model.named_modules():
            module.forward = self._recorded(path, module.forward)

    def _recorded(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None:
                return forward(*args, **kwargs)
            return self._recorder.module_call(path, forward, args, kwargs)

        return call

    def run(self, batch: FlatBatch, rules: Mapping[str, ModuleRule] | None = None, *, lines: bool = False) -> Script:
        """Return the script of a forward.

        Args:
            batch: real tensors; left as they are.
            rules: path of a module that is called as one step -> its rule; None to run and record all modules.
            lines: whether to note the lines of Python also where some modules do not run.

        Raises:
            CaptureError: Python reads a value that depends on activations, or draws random numbers itself.
        """
        recorder = Recorder(self.mode, rules or {}, lines=lines or rules is None)
        inputs = self._inputs(recorder, batch)
        with self._context(full=rules is None) as options, self._recording(recorder):
            loss = loss_of(self.model(**options, **batch.arguments(inputs)))
        return self._script(recorder, loss, full=rules is None)

    def run_program(self, program: Program, batch: FlatBatch, given: Mapping[str, Tensor]) -> Script:
        """Return the script of a program of `self.model` on a batch, with values for its holes."""
        recorder = Recorder(self.mode, {}, lines=True)
        inputs = self._inputs(recorder, batch)
        with self._context(full=True), self._recording(recorder):
            loss = program.run({**inputs, **given})
        return self._script(recorder, loss, full=True)

    def _inputs(self, recorder: Recorder, batch: FlatBatch) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                continue
            host = not (value.is_floating_point() or value.is_complex())
            given = value.detach().clone() if host else self.mode.from_tensor(value.detach(), static_shapes=True)
            if not host:
                recorder.know(given, lambda value=value: value)
            recorder.name(given, Value(ValueKind.INPUT, given, host, name))
            inputs[name] = given
        for name, parameter in self.model.named_parameters():
            recorder.name(parameter, Value(ValueKind.PARAMETER, parameter, False, name))
        for name, buffer in self.model.named_buffers():
            recorder.name(buffer, Value(ValueKind.BUFFER, buffer, not isinstance(buffer, FakeTensor), name))
        return inputs

    def _script(self, recorder: Recorder, loss: Tensor, *, full: bool) -> Script:
        paths = gradient_paths(loss, dict(self.model.named_parameters())) if full else None
        return Script(
            entries=recorder.entries, loss=recorder.value_of(loss), paths=paths, reads_floats=recorder.reads_floats
        )

    def hooked(self) -> list[str]:
        """Return the paths of modules with hooks around their forward."""
        return [path for path, m in self.model.named_modules() if path and has_hooks(m)]

    def results_by(self, shapes: ResultShapes) -> ModuleRule:
        """Return a rule that makes the fake results of a module from the sizes of its arguments."""

        def fake(result: Any, leaves: list[Any], before: list[Any]) -> Any:
            if not isinstance(result, tuple):
                return result
            if len(result) == 1:
                return before[result[0]]
            dtype, sizes = result
            shape = [size if isinstance(size, int) else leaves[size[0]].shape[size[1]] for size in sizes]
            with no_torch_functions(), self.mode:
                return torch.empty(shape, dtype=dtype)

        def results(leaves: list[Any]) -> Any:
            # Another structure may pass no tensor there, such as no mask.
            if any(
                not isinstance(leaves[leaf], torch.Tensor) or leaves[leaf].dim() != rank for leaf, rank in shapes.ranks
            ):
                return None
            if any(leaves[leaf].shape[dim] != size for leaf, dim, size in shapes.fixed):
                return None
            made: list[Any] = []
            for result in shapes.made:
                made.append(fake(result, leaves, made))
            return rebuild(shapes.structure, iter(made))

        return results

    @contextlib.contextmanager
    def _recording(self, recorder: Recorder) -> Generator[None]:
        self._recorder = recorder
        try:
            with recorder:
                yield
        finally:
            self._recorder = None

    @contextlib.contextmanager
    def _context(self, *, full: bool) -> Generator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=()))
            stack.enter_context(torch.enable_grad())
            options = stack.enter_context(without_cache(self.model))
            stack.enter_context(python_state_kept(self.model))
            for context in (packed_towers(self.model), traceable_experts(self.model), transformers_eager_paths()):
                stack.enter_context(context)
            stack.enter_context(plain_checkpointing())
            stack.enter_context(mkldnn_flags(allow_tf32=None))
            if full:
                stack.enter_context(no_python_randomness(self.model))
            yield options
