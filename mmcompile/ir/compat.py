"""Private API of torch and transformers that capture needs, in one place; `tests/ir/test_compat.py` checks it.

Written against torch 2.11-2.13 and transformers 5.9-5.24.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

import sympy
import torch
import torch.utils.checkpoint
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "VALUES_NEEDED",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "enable_python_dispatcher",
    "fake_copy",
    "fake_mode_of",
    "fake_on",
    "has_hooks",
    "is_mutating_op",
    "is_random_op",
    "mkldnn_flags",
    "no_torch_functions",
    "op_schema",
    "patched_tolist",
    "plain_checkpointing",
    "positions_of_text",
    "python_function",
    "real_execution",
    "shape_guards",
    "shape_hint",
    "size_expression",
    "size_hint",
    "storage_of",
    "transformers_eager_paths",
]

no_torch_functions: Any = torch._C.DisableTorchFunction  # leaves the mode in which functions of torch are recorded
mkldnn_flags: Any = torch.backends.mkldnn.flags  # without it, recurrent layers are recorded step by step
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""Exceptions raised if Python or an operation needs the values of a fake tensor."""
_CACHES = "transformers.pytorch_utils"
"""Module of transformers whose predicate for tracing guards caches of tensors: the predicate must return True while we trace."""
_TRACING_PREDICATES = ("is_tracing", "is_torchdynamo_exporting", "is_torchdynamo_compiling")


@contextlib.contextmanager
def real_execution() -> Generator[None]:
    """Leave every tracing mode (dispatch, pre-dispatch, torch-function), autocast and autograd: ops in the block really run."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad():
        yield


def fake_copy(mode: FakeTensorMode, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor of `value`'s static shape, on `device`."""
    fake = mode.from_tensor(value, static_shapes=True)
    return fake if fake.device == device else fake.to(device)


def fake_on(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the fake tensor on `device` of a tensor without data, whose memory it shares."""
    return FakeTensor(mode, meta, device)


def fake_mode_of(module: torch.nn.Module) -> FakeTensorMode | None:
    """Return the mode that a module's fake parameters belong to, or None for a real module."""
    for parameter in module.parameters():
        if isinstance(parameter, FakeTensor):
            return parameter.fake_mode
    return None


def has_hooks(module: torch.nn.Module) -> bool:
    """Return True if a module has hooks around its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def size_hint(size: int | torch.SymInt) -> int:
    """Return the value of a size in the captured batch, without guarding on it."""
    return size if isinstance(size, int) else int(size.node.hint)


def shape_hint(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor in the captured batch, without guarding on it."""
    return tuple(size_hint(size) for size in tensor.shape)


def size_expression(size: torch.SymInt) -> sympy.Expr:
    """Return a symbolic size as an expression over size symbols; symbols found to be equal are one symbol."""
    return size.node.shape_env.replace(size.node._expr)


def op_schema(op: OpOverload) -> Any:
    """Return the schema of an op: its `name`, `arguments` and `is_mutable`."""
    return op._schema


def is_mutating_op(target: object) -> bool:
    """Return whether a call target is an op that changes an argument in place."""
    return isinstance(target, OpOverload) and op_schema(target).is_mutable


def is_random_op(target: object) -> bool:
    """Return whether a call target is an op that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, equal for all views of one memory while it lives."""
    return tensor.untyped_storage()._cdata


def shape_guards(value: torch.Tensor) -> tuple[sympy.Expr, ...]:
    """Return all conditions on size symbols that a symbolic capture has assumed; `value` is any fake tensor of the capture."""
    env = value.fake_mode.shape_env  # type: ignore[attr-defined]
    return tuple(env.replace(guard.expr) for guard in env.guards)


def python_function(expression: sympy.Basic, arguments: Sequence[str]) -> Callable[..., Any]:
    """Return a function that computes an expression over size symbols from the symbols' values."""
    names = {"math": math, "torch": torch, "min": min, "max": max}
    return eval(f"lambda {', '.join(arguments)}: {PythonPrinter().doprint(expression)}", names)  # noqa: S307


@contextlib.contextmanager
def patched_tolist(answer: Callable[[FakeTensor], list[object] | None]) -> Generator[None]:
    """Replace `FakeTensor.tolist`, which reads element by element, by one that returns `answer(tensor)` unless it is None."""
    original = FakeTensor.tolist

    def tolist(self: FakeTensor) -> object:
        known = answer(self)
        return original(self) if known is None else known

    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = original  # type: ignore[method-assign]


@contextlib.contextmanager
def transformers_eager_paths() -> Generator[None]:
    """Make transformers take the path it takes in eager mode while we trace.

    Its tracing predicates return False, so that value tests (is the mask all true?) run on known values. Predicates that guard
    tensor caches return True, because a tensor made in a trace must not stay in a cache. Masks are built by broadcasting, since
    `torch.vmap` leaves batching ops in the graph. Nothing is imported: where transformers is not loaded, the model cannot be one
    of its classes.
    """
    masking = sys.modules.get("transformers.masking_utils")
    patches: list[tuple[ModuleType, str, object]] = []

    def patch(module: ModuleType, name: str, value: object) -> None:
        patches.append((module, name, module.__dict__[name]))
        setattr(module, name, value)

    loaded: list[tuple[str, object]] = list(sys.modules.items())
    for name, module in loaded:
        if name.startswith("transformers.") and isinstance(module, ModuleType):
            for predicate in _TRACING_PREDICATES:
                if callable(module.__dict__.get(predicate)):
                    answer = name == _CACHES
                    patch(module, predicate, lambda *args, answer=answer, **kwargs: answer)
    if masking is not None:
        patch(masking, "_vmap_expansion_sdpa", _broadcast_expansion(masking))
        patch(masking, "TransformGetItemToIndex", contextlib.nullcontext)
    try:
        yield
    finally:
        for module, name, value in reversed(patches):
            setattr(module, name, value)


@contextlib.contextmanager
def plain_checkpointing() -> Generator[None]:
    """Run checkpointed functions as plain calls inside the block: a plan chooses by itself what to recompute.

    Reentrant checkpointing would run them without gradient, and again in the backward, which a captured graph lacks.
    """
    module: Any = torch.utils.checkpoint
    reentrant = module.CheckpointFunction.__dict__.get("apply")
    generator = module._checkpoint_without_reentrant_generator

    def run(function: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
        return function(*args)

    def generate(*args: object, **kwargs: object) -> Generator[None]:
        yield

    module.CheckpointFunction.apply = staticmethod(run)
    module._checkpoint_without_reentrant_generator = generate
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        if reentrant is None:
            del module.CheckpointFunction.apply
        else:
            module.CheckpointFunction.apply = reentrant


def positions_of_text(model: torch.nn.Module, ids: torch.Tensor, inputs: Mapping[str, object]) -> torch.Tensor | None:
    """Return the `position_ids` that a transformers model computes to generate text; None if it generates no text.

    Args:
        model: model, whose state is not changed.
        ids: `input_ids` [B, S].
        inputs: arguments of forward; `labels` are not needed.
    """
    method = getattr(model, "_prepare_position_ids_for_generation", None)
    if method is None:
        return None
    kept = [(module, module.__dict__["rope_deltas"]) for module in model.modules() if "rope_deltas" in module.__dict__]
    try:
        with torch.no_grad():
            return method(ids, {name: value for name, value in inputs.items() if name != "labels"})
    finally:
        for module, deltas in kept:
            module.rope_deltas = deltas


def _broadcast_expansion(masking: ModuleType) -> Callable[..., object]:
    def expansion(mask_function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def expanded(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            mask = mask_function(*masking._non_vmap_expansion_sdpa(batch, head, query, key))
            return mask.expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

        return expanded

    return expansion
