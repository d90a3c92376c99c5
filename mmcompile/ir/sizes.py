"""Symbolic sizes: the batches that a symbolic capture holds for, and the value of every size in one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from mmcompile.errors import CaptureError
from mmcompile.ir.capture_errors import line_of_node
from mmcompile.ir.compat import python_function, shape_guards, shape_hint, size_expression, size_hint, storage_of
from mmcompile.ir.graph import dtype_name
from mmcompile.ir.tensor_spec import TensorSpec

Shape = tuple[int | sympy.Expr, ...]
SIZE_PREFIX = "size_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The size symbols of a capture. Without symbols, `bind` only compares shapes."""

    inputs: Mapping[str, Shape]
    """Input name -> shape, with symbols for sizes that may vary."""
    guards: tuple[sympy.Expr, ...] = ()
    """Conditions over size symbols that hold for every batch of the capture."""
    values: Mapping[str, sympy.Expr] = field(default_factory=dict)
    """Name of a size input of the graph (`size_0`) -> its value as an expression over symbols."""

    def bind(self, batch: Mapping[str, torch.Tensor], *, small: bool = False) -> dict[sympy.Symbol, int] | None:
        """Return symbol -> value for a batch, or None if the capture does not hold for its shapes.

        Args:
            batch: input name -> tensor.
            small: whether sizes may be 0 or 1 (`small`); if not, they are refused, since they mean something else (broadcasting).
        """
        bound, reason = self._bound(batch)
        if reason or not small and any(value < 2 for value in bound.values()):
            return None
        failed = (guard for guard in self.guards if not _value(guard, bound))
        return bound if all(small and _small_size(guard, bound) is not None for guard in failed) else None

    def small(self, bound: Mapping[sympy.Symbol, int]) -> list[str]:
        """Return the sizes that are 0 or 1, given symbol -> value, though the graph was captured for larger ones."""
        guarded = (_small_size(guard, bound) for guard in self.guards if not _value(guard, bound))
        small = [symbol for symbol, size in bound.items() if size < 2]
        return list(dict.fromkeys(str(size) for size in (*small, *guarded) if size is not None))

    def misfit(self, batch: Mapping[str, torch.Tensor]) -> str:
        """Return the reason for which `bind` refuses a batch, in words: the input and its size, or the condition on sizes."""
        bound, reason = self._bound(batch)
        if reason:
            return reason
        broken = next((guard for guard in self.guards if not _value(guard, bound)), None)
        if broken is not None:
            return f"sizes break a condition of the graph: {broken}, where {_named(self.inputs, broken)}"
        small = ", ".join(_named(self.inputs, symbol) for symbol, size in bound.items() if size < 2)
        return f"sizes of 0 or 1, with which other functions are called: {small}"

    def _bound(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[sympy.Symbol, int], str]:
        """Return (symbol -> value, reason for which the shapes of a batch are not those of the graph; empty if they are)."""
        bound: dict[sympy.Symbol, int] = {}
        for name, shape in self.inputs.items():
            actual = tuple(batch[name].shape)
            if len(actual) != len(shape):
                return bound, f"{name} has {len(actual)} dims, in the captured batch {len(shape)}"
            for dim, (size, expected) in enumerate(zip(actual, shape, strict=True)):
                if isinstance(expected, int) and size != expected:
                    return bound, f"{name} has size {size} in dim {dim}, in the captured batch {expected}"
                if isinstance(expected, sympy.Symbol) and bound.setdefault(expected, size) != size:
                    return bound, f"{name} has size {size} in dim {dim}, another input has {bound[expected]} for it"
        self._solve(batch, bound)
        for name, shape in self.inputs.items():
            for dim, (size, expected) in enumerate(zip(batch[name].shape, shape, strict=True)):
                if evaluate(expected, bound) != size:
                    return bound, f"{name} has size {size} in dim {dim}, which is not {expected}"
        return bound, ""

    def _solve(self, batch: Mapping[str, torch.Tensor], bound: dict[sympy.Symbol, int]) -> None:
        """Add the values of symbols that are the size of no input, but follow from one: `4*s` is 8."""
        waiting: list[tuple[Any, int]] = [
            (size, int(number))
            for name, shape in self.inputs.items()
            for size, number in zip(shape, batch[name].shape, strict=True)
            if isinstance(size, sympy.Expr)
        ]
        found = True
        while found:
            found = False
            for size, number in waiting:
                free: set[Any] = size.free_symbols - bound.keys()
                if len(free) == 1 and (value := solved(size.subs(list(bound.items())), number)) is not None:
                    bound[free.pop()] = value
                    found = True

    def size_inputs(self, bound: Mapping[sympy.Symbol, int]) -> dict[str, int]:
        """Return name -> value for every size input of the graph, given symbol -> value."""
        return {
            name: value
            for name, expression in self.values.items()
            if (value := evaluate(expression, bound)) is not None
        }

    def dynamic(self) -> dict[str, tuple[int, ...]]:
        """Input name -> dims that may vary."""
        found = {
            n: tuple(i for i, size in enumerate(shape) if not isinstance(size, int)) for n, shape in self.inputs.items()
        }
        return {name: dims for name, dims in found.items() if dims}


def solved(size: sympy.Expr, number: int) -> int | None:
    """Return the value of the one symbol in `size` for which it equals `number`; None if none does, or `size` is not linear."""
    line = _line(size)
    if line is None or (number - line[1]) % line[0]:
        return None
    return (number - line[1]) // line[0]


@functools.cache
def _line(size: sympy.Expr) -> tuple[int, int] | None:
    """Return (slope, start) of a size that is linear in its one symbol; None for others."""
    if len(size.free_symbols) != 1:
        return None
    symbol: Any = next(iter(size.free_symbols))
    slope: Any = sympy.diff(size, symbol)
    start: Any = size.subs(symbol, 0)
    return (int(slope), int(start)) if slope.is_Integer and slope and start.is_Integer else None


def _named(inputs: Mapping[str, Shape], expression: Any) -> str:
    """Return which input's size each symbol of an expression is, as text: `s0 is dim 1 of input_ids`."""
    places = {size: f"dim {dim} of {name}" for name, shape in inputs.items() for dim, size in enumerate(shape)}
    symbols = sorted(expression.free_symbols, key=str)
    return ", ".join(f"{symbol} is {places.get(symbol, 'computed')}" for symbol in symbols)


def evaluate(size: int | sympy.Expr, bound: Mapping[sympy.Symbol, int]) -> int | None:
    """Return a size as a number; None if a symbol in it has no value."""
    if isinstance(size, int):
        return size
    value = _value(size, bound)
    return None if value is None else int(value)


def _value(expression: Any, bound: Mapping[sympy.Symbol, int]) -> Any:
    """Return the value of an expression over size symbols; None if a symbol has no value, or it divides by zero."""
    symbols, compute = _compiled(expression)
    numbers = [bound.get(symbol) for symbol in symbols]
    try:
        return None if None in numbers else compute(*numbers)
    except ZeroDivisionError:
        return None


def _small_size(guard: Any, bound: Mapping[sympy.Symbol, int]) -> Any:
    """Return the size that a guard keeps from being 0 or 1, if it is that; None if the guard has another reason.

    `4*s >= 2` keeps `4*s` from it, and so does `2*s != 2` the symbol `s`.
    """
    if isinstance(guard, sympy.Ne):
        symbols: set[Any] = guard.free_symbols
        return next((symbol for symbol in symbols if bound.get(symbol, 2) < 2), None)
    sides = guard.args if isinstance(guard, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)) else ()
    found = next((side for side in sides if not side.is_number), None)
    apart = any(side.is_number and side in (0, 1, 2) for side in sides)
    return found if apart and _value(found, bound) in (0, 1) else None


@functools.cache
def _compiled(expression: Any) -> tuple[tuple[sympy.Symbol, ...], Callable[..., Any]]:
    # Substitution by sympy takes most of a second for the guards of a capture.
    symbols = tuple(sorted(expression.free_symbols, key=str))
    return symbols, python_function(expression, [str(symbol) for symbol in symbols])


def take_sizes(graph: fx.Graph) -> Sizes:
    """Turn every size that the graph computes into an input, and give all nodes concrete example values.

    A symbolic shape is kept in `node.meta["symbolic_shape"]`.
    """
    shapes: dict[str, Shape] = {}
    guards: tuple[sympy.Expr, ...] = ()
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            shapes[str(node.target)] = _symbolic_shape(value)
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                guards = shape_guards(value)
    values = _size_placeholders(graph)
    memory: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
    for node in graph.nodes:
        if "val" in node.meta:
            _make_concrete(node, memory)
    return Sizes(inputs=shapes, guards=guards, values=values)


def _symbolic_shape(value: torch.Tensor) -> Shape:
    sizes = cast("Sequence[int | torch.SymInt]", value.shape)
    return tuple(size if isinstance(size, int) else _number_or_expression(size_expression(size)) for size in sizes)


def _number_or_expression(expression: sympy.Expr) -> int | sympy.Expr:
    return int(expression) if expression.is_number else expression


def _size_placeholders(graph: fx.Graph) -> dict[str, sympy.Expr]:
    """Replace each size node by a number if the size is constant, else by a graph input: one per distinct symbolic expression.

    Return (name of the new graph input -> the expression of its size).
    """
    made: dict[sympy.Expr, fx.Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        if free_unbacked_symbols(value):
            raise CaptureError(
                f"a size depends on values that are not known during capture ({line_of_node(node)}): only inputs and what is "
                "computed from them alone are; compute the mask or the count from integer inputs"
            )
        expression = _number_or_expression(size_expression(value))
        if isinstance(expression, int):
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda n, old=node, number=expression: number if n is old else n)
                user.kwargs = fx.map_arg(user.kwargs, lambda n, old=node, number=expression: number if n is old else n)
            continue
        if expression not in made:
            with graph.inserting_after(last):
                last = graph.placeholder(f"{SIZE_PREFIX}{len(made)}")
            last.meta = {"val": size_hint(value), "size": str(expression)}
            made[expression] = last
        node.replace_all_uses_with(made[expression])
    return {str(node.target): expression for expression, node in made.items()}


def _make_concrete(node: fx.Node, memory: dict[int, tuple[torch.Tensor, torch.UntypedStorage]]) -> None:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and _has_symbols(value):
        node.meta["symbolic_shape"] = _symbolic_shape(value)
    node.meta["val"] = pytree.tree_map_only(
        torch.Tensor,
        lambda t: _concrete(t, memory) if _has_symbols(t) else t,
        pytree.tree_map_only(torch.SymInt, size_hint, value),
    )


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _concrete(tensor: torch.Tensor, memory: dict[int, tuple[torch.Tensor, torch.UntypedStorage]]) -> torch.Tensor:
    """Return an empty tensor like `tensor`, with each symbolic size replaced by its number in the captured batch.

    Views of one storage stay views of one storage.

    Args:
        tensor: tensor with symbols in its shape.
        memory: identity of a storage with symbols in its size -> (a tensor that keeps this storage alive, its replacement).
    """
    storage = storage_of(tensor)
    if storage not in memory:
        num_bytes = size_hint(tensor.untyped_storage().nbytes())
        memory[storage] = tensor, torch.empty(num_bytes, dtype=torch.uint8, device="meta").untyped_storage()
    stride = tuple(map(size_hint, tensor.stride()))
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    return made.set_(memory[storage][1], size_hint(tensor.storage_offset()), shape_hint(tensor), stride)  # type: ignore[call-overload]


def spec_of(node: fx.Node) -> TensorSpec:
    """Return name, shape and dtype of a tensor node; an input has the batch's name for it, not that of its node."""
    name = str(node.target) if node.op == "placeholder" else node.name
    return TensorSpec(name=name, shape=shape_of(node), dtype=dtype_name(node.meta["val"].dtype))


def shape_of(node: fx.Node) -> tuple[int | str, ...]:
    """Return the shape of a tensor node, symbolic sizes as text."""
    shape = node.meta.get("symbolic_shape") or node.meta["val"].shape
    return tuple(size if isinstance(size, int) else str(size) for size in shape)
