"""Turn a `StageProgram` back into a module."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.stage_module import LayerRunner, StageModule, run_eagerly
from mmcompile.errors import VerifyError


def load_stage(
    program: StageProgram,
    tensors: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    *,
    runner: LayerRunner = run_eagerly,
) -> StageModule:
    """Execute a program's source and build its `Stage` on the given tensors.

    Args:
        program: program of the stage.
        tensors: every parameter and buffer that the program reads, by original name. An `nn.Parameter` is used as it is, so
            several programs of a stage (for batches with and without images) can share it; a plain tensor is wrapped, sharing
            storage, with `requires_grad` as in its `ParameterSpec`.
        device: device of the tensors, and of tensors that the source makes.
        runner: function that runs the layer functions.

    Returns:
        A module whose `forward` takes `program.inputs` in order and returns a tuple in `program.outputs` order.

    Raises:
        VerifyError: the source does not compile, defines no `Stage(StageModule)`, or a tensor is missing.
    """
    wanted = [spec.name for spec in program.parameters] + list(program.buffers)
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise VerifyError(f"stage {program.stage} of pattern {program.pattern} reads {missing}, which were not given")
    parameters = {spec.name: _parameter(tensors[spec.name], spec.trainable) for spec in program.parameters}
    buffers = {name: tensors[name] for name in program.buffers}
    try:
        stage = _executed_class(program.source, program.stage, program.pattern)
    except SyntaxError as error:
        raise VerifyError(f"the source of stage {program.stage} does not compile: {error}") from error
    return stage(parameters, buffers, program.constants, device, runner, gathers=bool(program.gathered))


def execute(source: str, filename: str, **names: object) -> dict[str, object]:
    """Execute a source with torch, `StageModule` and `names` as globals, and return its namespace.

    Tracebacks and `inspect` show the source under `filename`.
    """
    # No modification time: linecache then never drops the entry.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, object] = {"__name__": "mmcompile_stage", "torch": torch, "StageModule": StageModule, **names}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def _parameter(tensor: Tensor, trainable: bool) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=trainable)


@functools.cache
def _executed_class(source: str, stage: str, pattern: str) -> type[StageModule]:
    """Return the class of `stage`, made by executing the generated module `source`. The class is cached for the process."""
    found = execute(source, f"<stage {stage} of pattern {pattern}>").get("Stage")
    if not (isinstance(found, type) and issubclass(found, StageModule)):
        raise VerifyError(f"the source of stage {stage} defines no class Stage(StageModule)")
    return found
