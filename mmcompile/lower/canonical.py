"""`CanonicalProgram`: the one pure function that all stage programs which differ in names only have in common.

The layers of a tower do the same to other parameters. Their programs name parameters and values as the model does, which is
what a person wants to read and what a compiler must not see: it would compile each of them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import dtype_name
from mmcompile.lower.load import held_tensors
from mmcompile.lower.program import Port, StageProgram

Kind = Literal["t", "c"]
TensorName = tuple[Kind, str]
"""Where a stage finds a tensor (`self.t` or `self.c`), and its name there."""

_SYMBOL = re.compile(r"[A-Za-z_]\w*(?![\w(])")
"""A size symbol in the text of a size: a name that is not called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalProgram:
    """A stage program without its names."""

    text: str
    """Source of `layer(tensors, *inputs)`, which returns what the stage's `forward` does and reads the global `device`.

    Tensors, inputs and values are numbered by first use. Comments give dtype and shape of tensors and inputs, so that equal texts
    compile to equal code. An input of kind "size" is a tensor of that many empty rows: a compiler takes a size for a variable in
    a shape only.
    """
    tensors: tuple[TensorName, ...]
    """What this program has in place of each of the function's tensors."""
    varying: tuple[tuple[int, ...], ...]
    """By input, the dims whose size varies."""


def canonical(program: StageProgram, tensors: Mapping[str, Tensor]) -> CanonicalProgram:
    """The function of a program, and what it is called on.

    Args:
        tensors: every parameter and buffer the program reads, by original name; only dtypes and shapes matter.

    Raises:
        VerifyError: a tensor is missing; or the source is not as `stage_source` writes it: it does not compile, has no
            `forward` in a class `Stage`, or uses `self` for something else than its tensors, constants and device.
    """
    parameters, buffers = held_tensors(program, tensors)
    trained = {spec.name for spec in program.parameters if spec.trainable}
    held: list[tuple[TensorName, str]] = [
        *((("t", name), _described(tensor, name in trained)) for name, tensor in {**parameters, **buffers}.items()),
        *((("c", name), _described(tensor, False)) for name, tensor in program.constants.items()),
    ]
    return _canonical(program.source, program.stage, program.inputs, tuple(held))


@functools.cache
def _canonical(
    source: str, stage: str, inputs: tuple[Port, ...], held: tuple[tuple[TensorName, str], ...]
) -> CanonicalProgram:
    """Made once a process: where stages move between ranks, it is asked for again and again.

    Args:
        held: description of every tensor.
    """
    module, owner, forward = _parsed(source, stage)
    arguments = [argument.arg for argument in forward.args.args[1:]]
    if len(arguments) != len(inputs):
        raise VerifyError(
            f"forward of stage {stage} takes {len(arguments)} inputs ({', '.join(arguments)}), its program has "
            f"{len(inputs)} ({', '.join(port.name for port in inputs)})"
        )
    renamed = _Renamed.of(stage, forward, arguments, dict(held))
    body = [renamed.visit(statement) for statement in _statements(forward, renamed.aliases)]
    names = tuple(renamed.tensors)
    lines = [
        *(ast.unparse(node) for node in module.body if node is not owner and not _is_text(node)),
        *(f"# t{at}: {renamed.held[name]}" for at, name in enumerate(names)),
        *_signature(inputs),
        f"def layer({', '.join(['tensors', *(f'x{at}' for at in range(len(inputs)))])}):",
        *([f"    {''.join(f't{at}, ' for at in range(len(names)))}= tensors"] if names else []),
        *(f"    {line}" for line in _sizes(inputs)),
        *(f"    {line}" for statement in body for line in ast.unparse(statement).splitlines()),
    ]
    return CanonicalProgram(
        text="\n".join(lines) + "\n",
        tensors=names,
        varying=tuple(
            (0,) if port.kind == "size" else tuple(dim for dim, size in enumerate(port.shape) if isinstance(size, str))
            for port in inputs
        ),
    )


def _parsed(source: str, stage: str) -> tuple[ast.Module, ast.ClassDef, ast.FunctionDef]:
    """The syntax trees of a source, its class `Stage`, and the `forward` in it."""
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise VerifyError(f"the source of stage {stage} does not compile: {error}") from error
    for owner in module.body:
        if isinstance(owner, ast.ClassDef) and owner.name == "Stage":
            for forward in owner.body:
                if isinstance(forward, ast.FunctionDef) and forward.name == "forward":
                    return module, owner, forward
    raise VerifyError(f"the source of stage {stage} has no function forward in a class Stage")


@dataclass(kw_only=True)
class _Renamed(ast.NodeTransformer):
    """Renames what belongs to the model: tensors, inputs, values."""

    stage: str
    names: dict[str, str]
    """Inputs and values met so far -> their new names."""
    local: frozenset[str]
    """All names that `forward` gives a value."""
    aliases: Mapping[str, Kind]
    """Local names for `self.t` or `self.c`."""
    held: Mapping[TensorName, str]
    """Descriptions of the tensors there are."""
    tensors: dict[TensorName, int] = field(default_factory=dict)
    """Those met so far."""

    @classmethod
    def of(cls, stage: str, forward: ast.FunctionDef, arguments: list[str], held: Mapping[TensorName, str]) -> _Renamed:
        stored = [n.id for n in ast.walk(forward) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        aliases: dict[str, Kind] = {
            statement.targets[0].id: kind
            for statement in forward.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
            if (kind := _kind(statement.value))
        }
        return cls(
            stage=stage,
            names={name: f"x{at}" for at, name in enumerate(arguments)},
            local=frozenset(stored) - aliases.keys(),
            aliases=aliases,
            held=held,
        )

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        kind = self.aliases.get(node.value.id) if isinstance(node.value, ast.Name) else _kind(node.value)
        if kind is None:
            return self.generic_visit(node)
        if not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)):
            raise self._unknown(node)
        name: TensorName = kind, node.slice.value
        if name not in self.held:
            raise VerifyError(
                f"line {node.lineno} of the source of stage {self.stage} reads {ast.unparse(node)}, which its program lists "
                "neither as a parameter or buffer nor as a constant"
            )
        return ast.Name(id=f"t{self.tensors.setdefault(name, len(self.tensors))}", ctx=ast.Load())

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_own(node, "device"):
            return ast.Name(id="device", ctx=ast.Load())
        if _is_own(node, node.attr):
            raise self._unknown(node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == "self" or node.id in self.aliases:
            raise self._unknown(node)
        if node.id in self.local and node.id not in self.names:
            self.names[node.id] = f"v{len(self.names)}"
        return ast.Name(id=self.names.get(node.id, node.id), ctx=node.ctx)

    def _unknown(self, node: ast.expr) -> VerifyError:
        return VerifyError(
            f"line {node.lineno} of the source of stage {self.stage} reads {ast.unparse(node)}; "
            'wanted self.t["name"], self.c["name"] or self.device'
        )


def _statements(forward: ast.FunctionDef, aliases: Mapping[str, str]) -> Iterator[ast.stmt]:
    """What `forward` computes: no text, no other names for `self.t`, and no `del`, which frees nothing in compiled code."""
    for statement in forward.body:
        alias = (
            isinstance(statement, ast.Assign) and isinstance(t := statement.targets[0], ast.Name) and t.id in aliases
        )
        if not (alias or isinstance(statement, ast.Delete) or _is_text(statement)):
            yield statement


def _kind(node: ast.expr) -> Kind | None:
    """Of the tensors in `self.t` or `self.c`; None for any other expression."""
    return "t" if _is_own(node, "t") else "c" if _is_own(node, "c") else None


def _is_own(node: ast.expr, name: str) -> bool:
    """Whether it is `self.name`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _described(tensor: Tensor, trained: bool) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{', trained' if trained else ''}"


def _signature(inputs: tuple[Port, ...]) -> Iterator[str]:
    """A comment for each input, size symbols numbered by first use."""
    symbols: dict[str, str] = {}

    def plain(text: str) -> str:
        return _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"n{len(symbols)}"), text)

    for at, port in enumerate(inputs):
        if port.kind == "size":
            yield f"# x{at}: size {plain(port.expression)}"
        else:
            shape = ", ".join(plain(size) if isinstance(size, str) else str(size) for size in port.shape)
            yield f"# x{at}: {port.dtype} [{shape}]{', gradient' if port.gradient else ''}"


def _sizes(inputs: tuple[Port, ...]) -> Iterator[str]:
    """Statements that read sizes, and that say which are equal: a compiler would find out one by one, or not at all."""
    first: dict[str, str] = {}
    for at, port in enumerate(inputs):
        if port.kind == "size":
            yield f"x{at} = x{at}.shape[0]"
        for dim, size in enumerate((port.expression,) if port.kind == "size" else port.shape):
            if not (isinstance(size, str) and size.isidentifier()):
                continue
            this = f"x{at}" if port.kind == "size" else f"x{at}.shape[{dim}]"
            if first.setdefault(size, this) != this:
                yield f"torch._check({this} == {first[size]})"
