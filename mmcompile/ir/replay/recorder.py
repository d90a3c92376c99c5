"""`Recorder`: records the calls of a forward in which floats are fake and integers real.

A call is recorded as the outermost function of torch that Python called. A call without parameters and float inputs is
host work: it runs on real tensors, so that Python may read them. All other calls run on fake tensors, for their shapes alone.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmcompile.errors import CaptureError
from mmcompile.ir.compat import FakeTensor, FakeTensorMode, no_torch_functions, real_execution, storage_of
from mmcompile.ir.replay import functions
from mmcompile.ir.replay.values import (
    Call,
    ModuleCall,
    Value,
    ValueKind,
    flatten,
    is_plain,
    rebuild,
    tensors_of,
)
from mmcompile.kernels.ctc_loss import ctc_loss

ModuleRule = Callable[[list[Any]], Any]
"""Function: leaves of a module's arguments -> its results on fake tensors, or None if the module must run."""


class Recorder(TorchFunctionMode):
    """Torch function mode that records a forward.

    Args:
        mode: mode of the fake tensors.
        rules: path of a module whose calls are recorded as one step each -> its rule.
        lines: whether to note the line of Python of each call, which takes longer.
    """

    def __init__(self, mode: FakeTensorMode, rules: Mapping[str, ModuleRule], *, lines: bool) -> None:
        super().__init__()
        self.entries: list[Call | ModuleCall] = []
        self._mode = mode
        self._rules = rules
        self._lines = lines
        self._levels = [self.entries]
        self._open: list[ModuleCall] = []
        self._silent = 0
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # ids are reused once a tensor dies
        self._real: dict[int, Callable[[], Tensor]] = {}
        """Identity of a fake float input, or of a copy of one -> its real value."""
        self._fakes: dict[int, Tensor] = {}
        """Identity of a host tensor that was written to with an activation -> the fake tensor that stands for it since."""
        self._by_storage: dict[int, list[Tensor]] = {}
        self.reads_floats = False
        """True once values of float inputs were read."""

    def name(self, tensor: Tensor, value: Value) -> Value:
        """Record which value a tensor has from now on."""
        self._values[id(tensor)] = value
        self._alive.append(tensor)
        if value.host:
            self._by_storage.setdefault(storage_of(tensor), []).append(tensor)
        return value

    def know(self, fake: Tensor, real: Callable[[], Tensor]) -> None:
        """Record the real values of a fake float input."""
        self._real[id(fake)] = real

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; one that no recorded call made is a constant."""
        tensor = self._fakes.get(id(tensor), tensor)
        found = self._values.get(id(tensor))
        if found is None:
            found = Value(ValueKind.CONSTANT, tensor, not isinstance(tensor, FakeTensor))
            self.name(tensor, found)
        return found

    def module_call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward of a module, and record it as one step, or as a call with all calls in it."""
        if self._silent:
            return forward(*args, **kwargs)
        call, args, kwargs = self._call("module", forward, path, args, kwargs)
        call.name, call.where = path, f"{call.where}, {path}" if call.where else path
        rule = self._rules.get(path)
        if rule is None:
            entry = ModuleCall(path, call)
            self._levels[-1].append(entry)
            self._levels.append(entry.entries)
            self._open.append(entry)
            try:
                out = forward(*args, **kwargs)
            finally:
                self._levels.pop()
                self._open.pop()
            leaves: list[Any] = []
            structure = flatten(out, leaves)
            values = [self.value_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            entry.outputs = structure, tuple(values)
            entry.plain = all(map(is_plain, (*call.leaves, *values)))
            call.results = [value for value in values if isinstance(value, Value)]
            for index, value in enumerate(call.results):
                value.origins.append((call, index))
            return out
        self._levels[-1].append(call)
        out = rule([leaf.tensor if isinstance(leaf, Value) else leaf for leaf in call.leaves])
        if out is None:
            with self._unrecorded():
                out = forward(*args, **kwargs)
        made: dict[int, Value] = {}  # a result may be there twice, as last hidden state and pooled one
        for index, tensor in enumerate(tensors_of(out)):
            if id(tensor) not in made:
                value = Value(ValueKind.RESULT, tensor, False, origins=[(call, index)])
                made[id(tensor)] = self.name(tensor, value)
            call.results.append(made[id(tensor)])
        return out

    @contextlib.contextmanager
    def _unrecorded(self) -> Generator[None]:
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._silent and (name in functions.TAKES_NUMBERS or name in ("__getitem__", "__setitem__")):
            args, kwargs = self._with_numbers(name, args, kwargs)
        if name == "register_hook" and args[0].requires_grad:
            raise CaptureError(
                "the model registers a hook on a tensor's gradient, which a graph does not have, so gradients would be wrong; "
                "change the gradient with tensor ops in forward, or take the hook off"
            )
        if self._silent or name in functions.QUESTIONS:
            return func(*args, **kwargs)
        if name == "__get__" and getattr(func.__self__, "__name__", "") not in functions.MOVING_PROPERTIES:
            return func(*args, **kwargs)
        return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        call, args, kwargs = self._call("step", func, name, args, kwargs)
        devices = [leaf for leaf in call.leaves if isinstance(leaf, Value) and not leaf.host]
        if not devices:
            return self._on_host(call, args, kwargs)
        if functions.makes_host_tensor(name, args, kwargs) or (
            name in functions.LIKE and isinstance(call.leaves[0], Value) and call.leaves[0].host
        ):
            return self._on_host(call, *self._with(call, _any_values))
        valued = all(id(leaf.tensor) in self._real for leaf in devices)
        if name in functions.READS:
            self._note_read()
            return self._on_values(call) if valued else func(*args, **kwargs)
        other = self._without_dynamic_shape(name, args, kwargs)
        return self._on_device(call, args, kwargs, valued) if other is None else self._run(*other)

    def _call(
        self, role: Literal["step", "module"], func: Any, name: str, args: Any, kwargs: Any
    ) -> tuple[Call, Any, Any]:
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        if self._fakes and any(id(leaf) in self._fakes for leaf in leaves):
            leaves = [self._fakes.get(id(leaf), leaf) for leaf in leaves]
            args, kwargs = rebuild(structure, iter(leaves))
        values = [self.value_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        where = _line() if self._lines else ""
        return Call(role, func, name, structure, values, torch.is_grad_enabled(), where), args, kwargs

    def _with(self, call: Call, stand_in: Callable[[Value], Tensor]) -> Any:
        """Return the arguments of a call with others in place of its fake tensors."""
        leaves = (
            (leaf.tensor if leaf.host else stand_in(leaf)) if isinstance(leaf, Value) else leaf for leaf in call.leaves
        )
        return rebuild(call.structure, leaves)

    def _with_numbers(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return arguments in which host tensors that stand for numbers, such as bounds of slices, are numbers."""

        def number(value: Any) -> Any:
            if (
                not isinstance(value, Tensor)
                or value.dim()
                or value.is_floating_point()
                or not self.value_of(value).host
            ):
                return value
            self._note_read()
            with no_torch_functions():
                return value.item()

        def visit(value: Any) -> Any:
            if isinstance(value, slice):
                return slice(number(value.start), number(value.stop), number(value.step))
            if isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size):
                return type(value)(map(visit, value)) if type(value) is not torch.Size else value
            return number(value) if name in functions.TAKES_NUMBERS else value

        first = 0 if name in ("arange", "linspace", "zeros", "ones", "full", "empty", "eye") else 1
        return (*args[:first], *map(visit, args[first:])), {key: visit(value) for key, value in kwargs.items()}

    def _note_read(self) -> None:
        for entry in self._open:
            entry.reads = True

    # Host work.

    def _on_host(self, call: Call, args: Any, kwargs: Any) -> Any:
        call.role = "host"
        if call.name in functions.READS:
            self._note_read()
            return call.function(*args, **kwargs)
        call.dynamic = functions.has_dynamic_shape(call.name, args, kwargs)
        if call.dynamic:
            self._note_read()
        return self._named_on_host(
            call, call.function(*args, **kwargs), functions.writes_in_place(call.name, kwargs), args, kwargs
        )

    def _named_on_host(self, call: Call, out: Any, in_place: bool, args: Any, kwargs: Any) -> Any:
        if in_place:
            self._write(kwargs.get("out", args[0] if args else None))
            return out
        self._levels[-1].append(call)
        for index, tensor in enumerate(tensors_of(out)):
            if id(tensor) not in self._values:
                self.name(tensor, Value(ValueKind.RESULT, tensor, True, origins=[(call, index)]))
            call.results.append(self._values[id(tensor)])
        return out

    def _write(self, target: Any) -> None:
        """After a write in place, give all host tensors in the same memory new values, whose calls are not known."""
        assert isinstance(target, Tensor)
        for tensor in self._by_storage.get(storage_of(target), ()):
            value = self._values[id(tensor)]
            self._values[id(tensor)] = Value(value.kind, tensor, True, value.name, value.origins, written=True)

    def _on_values(self, call: Call) -> Any:
        self.reads_floats = True
        args, kwargs = self._with(call, lambda leaf: self._real[id(leaf.tensor)]())
        with real_execution():
            return call.function(*args, **kwargs)

    # Work on parameters and float inputs.

    def _without_dynamic_shape(self, name: str, args: Any, kwargs: Any) -> tuple[Any, str, Any, Any] | None:
        """Return a call on positions, which the host computes, in place of one whose result's shape depends on values.

        Args:
            name, args, kwargs: the call, on a float tensor.

        Returns:
            (function, name, args, kwargs), or None if the call's shape depends on no values of the host.
        """
        if name in ("__getitem__", "__setitem__", "index_put", "index_put_"):
            index = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            if not any(functions.is_mask(part) and self.value_of(part).host for part in index):
                return None
            self._note_read()
            found: list[Any] = []
            for part in index:
                mask = functions.is_mask(part) and self.value_of(part).host
                found += self._run(torch.Tensor.nonzero, "nonzero", (part,), {"as_tuple": True}) if mask else [part]
            return getattr(torch.Tensor, name), name, (args[0], tuple(found), *args[2:]), kwargs
        if name == "masked_select" and self.value_of(args[1]).host:
            return torch.Tensor.__getitem__, "__getitem__", (args[0], args[1]), {}
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        if name != "repeat_interleave" or not isinstance(repeats, Tensor) or not self.value_of(repeats).host:
            return None
        source, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim")
        if dim is None:
            source, dim = self._run(torch.Tensor.flatten, "flatten", (source,), {}), 0
        repeats = self._run(torch.Tensor.expand, "expand", (repeats, source.shape[dim]), {})
        rows = self._run(torch.repeat_interleave, "repeat_interleave", (repeats,), {})
        return torch.Tensor.index_select, "index_select", (source, dim, rows), {}

    def _on_device(self, call: Call, args: Any, kwargs: Any, valued: bool) -> Any:
        name = call.name
        in_place = functions.writes_in_place(name, kwargs)
        if in_place:
            args = self._with_fake_target(call, args, kwargs)
        elif name == "__get__" or (functions.is_move(name, args, kwargs) and not _is_indexed_by_activations(call)):
            call.role = "move"
            if (whole := self._joined(call, args, kwargs)) is not None:
                return self._run(torch.Tensor.clone, "clone", (whole,), {})
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CaptureError("the model switches autocast on inside forward; enable it outside, or cast explicitly")
        # torch's loss has a table whose size depends on values; a trace replaces it too.
        out = (ctc_loss if call.function is torch.nn.functional.ctc_loss else call.function)(*args, **kwargs)
        if isinstance(out, Tensor) and not in_place and id(out) in self._values:
            with no_torch_functions():
                out = torch.ops.aten.alias.default(out)
        tensors = tensors_of(out)
        if functions.fills(name):
            filled = self._with(call, _any_values)
            self.know(tensors[0], lambda: call.function(*filled[0], **filled[1]))
        if valued and not in_place and tensors and not functions.draws(name):
            if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
                call.role = "host"
                return self._named_on_host(call, self._on_values(call), False, args, kwargs)
            for index, tensor in enumerate(tensors):
                self.know(tensor, lambda index=index: tensors_of(self._on_values(call))[index])
        self._levels[-1].append(call)
        if in_place:
            tensors = [kwargs.get("out", args[0])]
            self._real.pop(id(tensors[0]), None)
        for index, tensor in enumerate(tensors):
            call.results.append(self.name(tensor, Value(ValueKind.RESULT, tensor, False, origins=[(call, index)])))
        return out

    def _with_fake_target(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a write in place, with a fake tensor in place of a host tensor that is written to."""
        target = kwargs.get("out", args[0])
        if "out" in kwargs or not self.value_of(target).host:
            return args
        for other in self._by_storage.get(storage_of(target), ()):
            if other is not target:
                self._values[id(other)].written = True
        with no_torch_functions():
            fake = self._mode.from_tensor(target, static_shapes=True)
        self._fakes[id(target)] = fake
        self._alive.append(target)
        return (fake, *args[1:])

    def _joined(self, call: Call, args: Any, kwargs: Any) -> Tensor | None:
        """Return the tensor that was split into the tensors that `call` joins again; None for another call."""
        if call.name not in ("cat", "concat", "concatenate") or not args or not isinstance(args[0], (list, tuple)):
            return None
        pieces = [self.value_of(piece) for piece in args[0]]
        first = pieces[0].origins[0][0] if pieces and pieces[0].origins else None
        if first is None or first.name not in (*functions.SPLITS, "chunk"):
            return None
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        source = first.leaves[0]
        given, options = rebuild(first.structure, iter(first.leaves))
        cut = given[2] if len(given) > 2 else options.get("dim", 0)
        same = len(first.results) == len(pieces) and all(a is b for a, b in zip(first.results, pieces, strict=True))
        return source.tensor if same and dim % source.tensor.dim() == cut % source.tensor.dim() else None


def _any_values(leaf: Value) -> Tensor:
    """Return a host tensor of the shape and type of a fake one, for a function that reads no values."""
    with no_torch_functions():
        return torch.empty(1, dtype=leaf.tensor.dtype).expand(leaf.tensor.shape)


def _is_indexed_by_activations(call: Call) -> bool:
    further = (leaf for leaf in call.leaves[1:] if isinstance(leaf, Value))
    return call.name in functions.INDEXES and any(not leaf.host for leaf in further)


_SILENT = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
"""Folders whose lines are none of the model's Python."""


def _line() -> str:
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SILENT):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
