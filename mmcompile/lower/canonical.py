"""`CanonicalProgram`: the one pure function that all stage programs which differ in names only have in common.

The layers of a tower do the same to other parameters. Their programs name parameters and values as the model does, which is
what a person wants to read and what a compiler must not see: it would compile each of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import dtype_name
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
        VerifyError: the source is not what `stage_source` writes: it does not compile, has no `forward` in a class `Stage`, or
            uses `self` for something else than its tensors, constants and device.
    """
    module = parse(program)
    stage = next((n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "Stage"), None)
    forward = (
        next((n for n in stage.body if isinstance(n, ast.FunctionDef) and n.name == "forward"), None) if stage else None
    )
    if stage is None or forward is None:
        raise VerifyError(f"the source of stage {program.stage} has no function forward in a class Stage")
    arguments = [argument.arg for argument in forward.args.args[1:]]
    if len(arguments) != len(program.inputs):
        raise VerifyError(
            f"forward of stage {program.stage} takes {len(arguments)} inputs ({', '.join(arguments)}), its program has "
            f"{len(program.inputs)} ({', '.join(port.name for port in program.inputs)})"
        )
    renamed = _Renamed.of(program, forward, arguments)
    body = [renamed.visit(statement) for statement in _statements(forward, renamed.held)]
    rest = [ast.unparse(node) for node in module.body if node is not stage and not _is_text(node)]
    names = tuple(renamed.tensors)
    held = {("t", name): tensor for name, tensor in tensors.items()} | {
        ("c", name): tensor for name, tensor in program.constants.items()
    }
    trained = {spec.name for spec in program.parameters if spec.trainable}
    lines = [
        *rest,
        *(
            f"# t{at}: {_described(held[name])}{', trained' if name[0] == 't' and name[1] in trained else ''}"
            for at, name in enumerate(names)
        ),
        *_signature(program.inputs),
        f"def layer({', '.join(['tensors', *(f'x{at}' for at in range(len(arguments)))])}):",
        *([f"    {''.join(f't{at}, ' for at in range(len(names)))}= tensors"] if names else []),
        *(f"    {line}" for line in _sizes(program.inputs)),
        *(f"    {line}" for statement in body for line in ast.unparse(statement).splitlines()),
    ]
    return CanonicalProgram(
        text="\n".join(lines) + "\n",
        tensors=names,
        varying=tuple(
            (0,) if port.kind == "size" else tuple(dim for dim, size in enumerate(port.shape) if isinstance(size, str))
            for port in program.inputs
        ),
    )


def parse(program: StageProgram) -> ast.Module:
    """The syntax tree of a program's source. Raises VerifyError."""
    try:
        return ast.parse(program.source)
    except SyntaxError as error:
        raise VerifyError(f"the source of stage {program.stage} does not compile: {error}") from error


@dataclass(kw_only=True)
class _Renamed(ast.NodeTransformer):
    """Renames what belongs to the model: tensors, inputs, values."""

    stage: str
    names: dict[str, str]
    """Inputs and values met so far -> their new names."""
    local: frozenset[str]
    """All names that `forward` gives a value."""
    held: Mapping[str, Kind]
    """Local names for `self.t` or `self.c`."""
    tensors: dict[TensorName, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: StageProgram, forward: ast.FunctionDef, arguments: list[str]) -> _Renamed:
        stored = [n.id for n in ast.walk(forward) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        held: dict[str, Kind] = {
            statement.targets[0].id: kind
            for statement in forward.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
            if (kind := _kind(statement.value))
        }
        return cls(
            stage=program.stage,
            names={name: f"x{at}" for at, name in enumerate(arguments)},
            local=frozenset(stored) - held.keys(),
            held=held,
        )

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        kind = self.held.get(node.value.id) if isinstance(node.value, ast.Name) else _kind(node.value)
        if kind is None:
            return self.generic_visit(node)
        if not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)):
            raise self._unknown(node)
        return ast.Name(id=f"t{self.tensors.setdefault((kind, node.slice.value), len(self.tensors))}", ctx=ast.Load())

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_own(node, "device"):
            return ast.Name(id="device", ctx=ast.Load())
        if _is_own(node, node.attr):
            raise self._unknown(node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == "self" or node.id in self.held:
            raise self._unknown(node)
        if node.id in self.local and node.id not in self.names:
            self.names[node.id] = f"v{len(self.names)}"
        return ast.Name(id=self.names.get(node.id, node.id), ctx=node.ctx)

    def _unknown(self, node: ast.expr) -> VerifyError:
        return VerifyError(
            f"line {node.lineno} of the source of stage {self.stage} reads {ast.unparse(node)}; "
            'wanted self.t["name"], self.c["name"] or self.device'
        )


def _statements(forward: ast.FunctionDef, held: Mapping[str, str]) -> Iterator[ast.stmt]:
    """What `forward` computes: without `del`, which frees nothing in compiled code, text, and other names for `self.t`."""
    for statement in forward.body:
        names = isinstance(statement, ast.Assign) and isinstance(t := statement.targets[0], ast.Name) and t.id in held
        if not (names or isinstance(statement, ast.Delete) or _is_text(statement)):
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


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


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
