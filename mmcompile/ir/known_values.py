"""Known values: during a capture, inputs keep their real values while parameters and activations stay fake.

Multimodal models compute sizes from small integer inputs (image grids, feature lengths, placeholder positions) in plain
Python. A fake tensor has no values, so `torch.export` fails there. Here every op whose inputs are all known is also run
for real, beside the trace; reads by Python (`.tolist()`, `if mask.all()`, `nonzero`) then get the real value, and are
marked in the graph (`value_read`). The graph thus specialises on these values as it does on static shapes, and the
marks determine for which other batches it holds.

Limit: large float activations are never known, so a branch on one has no value and the capture fails with a reason.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mmcompile.errors import CaptureError
from mmcompile.ir.compat import (
    FakeTensor,
    FakeTensorMode,
    fake_copy,
    is_mutating_op,
    is_random_op,
    patched_tolist,
    real_execution,
    shape_hint,
    size_hint,
)
from mmcompile.ir.nodes import VALUE_READ
from mmcompile.kernels.ctc_loss import ctc_loss

aten = torch.ops.aten

# Integer tensors hold masks and positions, up to [batch, 1, 4096, 4096]; floats beyond a table of sizes are activations.
MAX_KNOWN_INTEGERS = 1 << 25
MAX_KNOWN_FLOATS = 1 << 16

_VALUE_READS: tuple[Callable[..., Any], ...] = (
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
)
_NUMBERS: dict[Callable[..., Any], dict[int, str]] = {torch.narrow: {2: "start"}, torch.Tensor.narrow: {2: "start"}}
"""Functions that take tensors where they need numbers -> positions and names of these arguments."""


def _selected(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return input.expand(shape)[mask.expand(shape)]


def _repeated(
    input: torch.Tensor, repeats: torch.Tensor | int | None = None, dim: int | None = None, **kwargs: Any
) -> torch.Tensor:
    if not isinstance(repeats, torch.Tensor):
        return torch.repeat_interleave(input, *(() if repeats is None else (repeats, dim)), **kwargs)
    input, dim = (input.flatten(), 0) if dim is None else (input, dim)
    return input.index_select(dim, torch.repeat_interleave(repeats.expand(input.shape[dim])))


_WITHOUT_DYNAMIC_SIZES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.masked_select: _selected,
    torch.Tensor.masked_select: _selected,
    torch.repeat_interleave: _repeated,
    torch.Tensor.repeat_interleave: _repeated,
    torch.nn.functional.ctc_loss: ctc_loss,
    torch.Tensor.expand_as: lambda input, other: input.expand(other.shape),
}
"""Function whose result depends on values or on a shape alone -> the same by indices or by that shape, known where these are."""
NEW = (aten.new_ones.default, aten.new_zeros.default, aten.new_full.default)
FACTORIES_LIKE: dict[Any, Any] = {
    aten.new_ones.default: aten.ones.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_full.default: aten.full.default,
    aten.ones_like.default: aten.ones.default,
    aten.zeros_like.default: aten.zeros.default,
    aten.full_like.default: aten.full.default,
}
"""Factory op that takes only dtype, device or shape from a tensor -> factory of the same values without a tensor argument."""
_COPIES = (aten._to_copy.default, aten.clone.default, aten._unsafe_view.default)


def is_copy(op: Any) -> bool:
    """Return True for an op whose result has the values of its input: known at any size if the input is."""
    return getattr(op, "is_view", False) or op in _COPIES


def is_boolean(value: object) -> bool:
    """Return True if a value is a boolean (or uint8) tensor, which indexes as a mask."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


class KnownValues:
    """Map from fake tensors to their real values, for tensors whose value is known."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._alive: list[torch.Tensor] = []  # ids are reused once a tensor dies
        self.fake_mode: FakeTensorMode | None = None

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Record that `fake` has the value `real`."""
        self._real[id(fake)] = (weakref.ref(fake), real)
        self._alive.append(fake)
        if isinstance(fake, FakeTensor):
            self.fake_mode = fake.fake_mode

    def forget(self, fake: torch.Tensor) -> None:
        """Remove the value of a tensor that was changed in place."""
        self._real.pop(id(fake), None)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the real value of `tensor`; None if it is not known."""
        entry = self._real.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        if not isinstance(tensor, FakeTensor):
            return tensor if type(tensor) is torch.Tensor and tensor.device.type != "meta" else None
        return tensor.constant

    def known_arguments(self, func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of a call, with a stand-in of the same shape for a tensor whose values the op does not read."""
        if func not in FACTORIES_LIKE or self.get(args[0]) is not None:
            return tuple(args)
        with real_execution():
            return torch.empty(1, dtype=args[0].dtype).expand(shape_hint(args[0])), *args[1:]

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `func` on the real values of known tensors, on CPU."""
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, self.get, (tuple(args), dict(kwargs)))
        real_args, real_kwargs = pytree.tree_map_only(torch.SymInt, size_hint, (real_args, real_kwargs))
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = "cpu"
        with real_execution():
            return func(*real_args, **real_kwargs)

    def fake_of(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a new fake tensor on `device` whose known value is a copy of `real`."""
        assert self.fake_mode is not None
        with real_execution():
            value = real.detach().clone()
        fake = fake_copy(self.fake_mode, value, device)
        self.learn(fake, value)
        return fake


class _KnownDispatch(TorchDispatchMode):
    """Dispatch mode below the tracer that computes the real value of each op whose inputs all have known real values.

    All ops are run on fake tensors as well, as in any trace.
    """

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self.known = known
        # Layer drop asks `torch.rand([]) < p` even for p = 0, where the answer needs no value.
        self.uniform: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                self.known.fake_mode = tensor.fake_mode
                break
        if func is VALUE_READ:
            return None
        symbolic = any(isinstance(leaf, (torch.SymFloat, torch.SymBool)) for leaf in leaves)
        known_args = self.known.known_arguments(func, args) if tensors else args
        needed = pytree.tree_leaves((known_args, kwargs))
        all_known = not (symbolic or is_random_op(func)) and all(
            self.known.get(leaf) is not None for leaf in needed if isinstance(leaf, torch.Tensor)
        )
        if all_known and tensors and self._needs_value(func, args):
            return pytree.tree_map_only(
                torch.Tensor,
                lambda real: self.known.fake_of(real, tensors[0].device),
                self.known.run(func, args, kwargs),
            )
        args, kwargs, func_output = self._with_concrete_indices(func, args, kwargs)
        if func_output is not None:
            return func_output
        output = func(*args, **kwargs)
        drawn = bool(tensors) and any(tensors[0] is draw for draw in self.uniform)
        if func is aten.rand.default or func is aten.detach.default and drawn:
            self.uniform.append(output)
        elif func is aten.lt.Scalar and args[1] <= 0 and drawn:
            with real_execution():
                self.known.learn(output, torch.zeros(shape_hint(output), dtype=torch.bool))
        elif is_mutating_op(func) and tensors:
            self._after_mutation(func, args, kwargs, all_known)
        elif all_known:
            self._learn_outputs(func, known_args, kwargs, tensors, output)
        return output

    def _needs_value(self, func: Any, args: Sequence[Any]) -> bool:
        if func is aten.index.Tensor:  # tagged as of dynamic shape, which it only is under masks
            return any(is_boolean(index) for index in args[1])
        dynamic = func is aten.where.default or torch.Tag.dynamic_output_shape in func.tags
        return dynamic or torch.Tag.data_dependent_output in func.tags

    def _with_concrete_indices(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return (args, kwargs, result) for indexing by a mask, or repeating by counts, whose real value is known.

        The mask is replaced by index tensors, so that the result has a fixed shape. The result is None if the op must still run.
        """
        known = self.known
        if func is aten.index.Tensor and any(is_boolean(i) and known.get(i) is not None for i in args[1]):
            indices: list[torch.Tensor | None] = []
            for index in args[1]:
                mask = known.get(index) if is_boolean(index) else None
                if mask is None:
                    indices.append(index)
                    continue
                with real_execution():
                    positions = mask.nonzero(as_tuple=True)
                indices.extend(known.fake_of(position, index.device) for position in positions)
            return (args[0], indices), kwargs, None
        if func is aten.masked_select.default and (mask := known.get(args[1])) is not None:
            with real_execution():
                count = int(mask.expand(torch.broadcast_shapes(shape_hint(args[0]), mask.shape)).sum())
            return args, kwargs, args[0].new_empty((count,))
        if func is aten.repeat_interleave.self_Tensor and (repeats := known.get(args[1])) is not None:
            with real_execution():
                return args, {**kwargs, "output_size": int(repeats.sum())}, None
        return args, kwargs, None

    def _after_mutation(self, func: Any, args: Any, kwargs: Any, all_known: bool) -> None:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None or self.known.get(target) is None:
            return
        if all_known:
            self.known.run(func, args, kwargs)  # real views share storage as the fake ones do
        else:
            self.known.forget(target)

    def _learn_outputs(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], output: Any) -> None:
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not outputs or not all(
            isinstance(out, FakeTensor) and self._worth_knowing(func, out, inputs) for out in outputs
        ):
            return
        reals = [
            leaf for leaf in pytree.tree_leaves(self.known.run(func, args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        for fake, real in zip(outputs, reals, strict=True):
            if shape_hint(fake) == tuple(real.shape):
                self.known.learn(fake, real)

    def _worth_knowing(self, func: Any, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
        num_elements = math.prod(shape_hint(out))
        if num_elements > MAX_KNOWN_INTEGERS:
            return False
        drawn = not inputs and "rand" in func.name()
        if (
            drawn or not inputs and "empty" in func.name() and out.is_floating_point()
        ):  # a table of counts is filled later
            return False
        if out.is_floating_point() or out.is_complex():
            # Beyond the limit only copies of inputs stay known, so that tests like `(pixels == 0).all()` have an answer.
            return num_elements <= MAX_KNOWN_FLOATS or (bool(inputs) and is_copy(func))
        return True


class _KnownFunctions(TorchFunctionMode):
    """Torch function mode of a trace that answers reads such as `tensor.item()` from the tensor's real value, if it is known."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            return self._tensor_of_list(func, args, kwargs)
        if func is torch.Tensor.register_hook and args[0].requires_grad:
            raise CaptureError(
                "the model registers a hook on a tensor's gradient, which a graph does not have, so gradients would be wrong; "
                "change the gradient with tensor ops in forward, or take the hook off"
            )
        if func in (torch.Tensor.new_tensor, torch.Tensor.new) and isinstance((*args, None)[1], (list, tuple)):
            return self._learned(func(*args, **kwargs), args[1])
        if func in _NUMBERS:
            names = _NUMBERS[func]
            args = tuple(self._as_numbers(arg) if at in names else arg for at, arg in enumerate(args))
            kwargs = {name: self._as_numbers(arg) if name in names.values() else arg for name, arg in kwargs.items()}
        if func in _VALUE_READS and isinstance(args[0], FakeTensor):
            real = self.known.get(args[0])
            if real is not None:
                return self.read(args[0], real, func, args[1:], kwargs)
        if func in _WITHOUT_DYNAMIC_SIZES:
            return _WITHOUT_DYNAMIC_SIZES[func](*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except (TypeError, RuntimeError):  # a tensor of one element where the op's C++ wants a number
            numbers = pytree.tree_map(self._as_number, (args, kwargs))
            if all(
                a is b for a, b in zip(pytree.tree_leaves(numbers), pytree.tree_leaves((args, kwargs)), strict=True)
            ):
                raise
        return func(*numbers[0], **numbers[1])

    def read(
        self, fake: torch.Tensor, real: torch.Tensor, func: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the result of `func`, such as `Tensor.item`, on a tensor's real value; mark the read by a node of the graph."""
        VALUE_READ(fake)
        with real_execution():
            return func(real, *args, **(kwargs or {}))

    def _tensor_of_list(self, func: Any, args: Any, kwargs: Any) -> Any:
        def literal(value: Any) -> Any:
            real = self.known.get(value)
            return value if real is None else self.read(value, real, torch.Tensor.tolist)

        data = pytree.tree_map_only(torch.Tensor, literal, args[0])
        return self._learned(func(data, *args[1:], **kwargs), data)

    def _as_numbers(self, value: Any) -> Any:
        real = self.known.get(value) if isinstance(value, torch.Tensor) else None
        return value if real is None else self.read(value, real, torch.Tensor.tolist)

    def _as_number(self, value: Any) -> Any:
        counts = isinstance(value, FakeTensor) and not value.dim() and not value.is_floating_point()
        return self._as_numbers(value) if counts else value

    def _learned(self, out: Any, data: Any) -> Any:
        leaves = pytree.tree_leaves(data)
        plain = not any(isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) for x in leaves)
        if isinstance(out, torch.Tensor) and plain and self.known.get(out) is None:
            with real_execution():
                self.known.learn(out, torch.tensor(data, dtype=out.dtype, device="cpu"))
        return out


@contextlib.contextmanager
def known_values(known: KnownValues) -> Generator[None]:
    """Answer reads of known tensors with their values while the block is traced."""
    functions = _KnownFunctions(known)

    def tolist(fake: FakeTensor) -> list[object] | None:
        real = known.get(fake)
        return None if real is None else functions.read(fake, real, torch.Tensor.tolist)

    with patched_tolist(tolist), _KnownDispatch(known), functions:
        yield
