"""`CanonicalLayer`: the common function of all layer functions that differ in names only.

Layer functions name parameters and values as the model does, for people to read. A compiler must not see these names:
it would compile the same layer again for every stage that has it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mmcompile.codegen.expressions import NAMES
from mmcompile.errors import VerifyError

_SYMBOL = re.compile(r"[A-Za-z_]\w*(?![\w(])")
"""Pattern of a size symbol in the text of a size: a name that is not called."""
_TENSOR = re.compile(r"\w+ \[(?P<shape>.*)\](?:, (?P<role>trained|gradient|tap))?")
_KNOWN = NAMES | {"float", "slice", "tapped", "handed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerArgument:
    """Annotation of a layer function's argument.

    Its text is "device", "size s0", or "float32 [s0, 64]", which may be followed by ", trained" (a parameter with gradient), ",
    gradient" (a value with gradient) or ", tap" (zeros on which the backward leaves a gradient).
    """

    description: str
    sizes: tuple[str, ...]
    """Sizes of a tensor by dim, as text; for an argument that is a size, that size alone."""

    @classmethod
    def parse(cls, text: str) -> LayerArgument | None:
        """Parse the text of an annotation; return None for any other text."""
        if text == "device":
            return cls(description=text, sizes=())
        if text.startswith("size "):
            return cls(description=text, sizes=(text.removeprefix("size "),))
        match = _TENSOR.fullmatch(text)
        return cls(description=text, sizes=tuple(_split(match["shape"]))) if match else None

    @property
    def is_size(self) -> bool:
        """True if the argument is a size."""
        return self.description.startswith("size ")

    @property
    def is_tap(self) -> bool:
        """True if the argument is a tensor of zeros (a tap), passed so that the backward leaves a gradient on it."""
        return self.description.endswith(", tap")

    @property
    def varying(self) -> tuple[int, ...]:
        """Dims whose size is not a literal number. An argument that is a size is passed as a tensor of that many empty rows."""
        return tuple(dim for dim, size in enumerate(self.sizes) if not size.isdecimal())


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalLayer:
    """A layer function with its names replaced by numbers, so that equal layers have equal text."""

    text: str
    """Source of `layer(a0, a1, ...)`. Arguments, values and size symbols are numbered by first use.

    Annotations are kept, so that equal texts compile to equal code. An argument that is a size is passed as a tensor of that many
    empty rows, because a compiler treats a size as variable only in a shape.
    """
    arguments: tuple[LayerArgument, ...]


@functools.cache
def canonical_layers(source: str, stage: str) -> Mapping[str, CanonicalLayer]:
    """Return function name -> canonical layer for all layer functions of the source of a stage, those outside its class.

    Results are cached for the process, because stages that move between ranks need them repeatedly.

    Raises:
        VerifyError: the source does not compile, or a function is not of the form that `stage_source` writes.
    """
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise VerifyError(f"the source of stage {stage} does not compile: {error}") from error
    return {node.name: _canonical(node, stage) for node in module.body if isinstance(node, ast.FunctionDef)}


def _canonical(function: ast.FunctionDef, stage: str) -> CanonicalLayer:
    where = f"function {function.name} of stage {stage}"
    given = function.args
    if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults:
        raise VerifyError(f"{where} takes arguments by name or with defaults; wanted plain ones")
    arguments = tuple(_argument(argument, where) for argument in given.args)
    names = {argument.arg: f"a{at}" for at, argument in enumerate(given.args)}
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    renamed = _Renamed(where=where, names=names, local=frozenset(stored))
    body = [renamed.visit(statement) for statement in function.body if not _is_left_out(statement)]
    plain = _Symbols()
    signature = ", ".join(f"a{at}: {plain.in_text(found.description)!r}" for at, found in enumerate(arguments))
    lines = [
        f"def layer({signature}):",
        *(f"    {line}" for line in _sizes(arguments)),
        *(f"    {line}" for statement in body for line in ast.unparse(statement).splitlines()),
    ]
    return CanonicalLayer(text="\n".join(lines) + "\n", arguments=arguments)


def _argument(argument: ast.arg, where: str) -> LayerArgument:
    note = argument.annotation
    found = LayerArgument.parse(note.value) if isinstance(note, ast.Constant) and isinstance(note.value, str) else None
    if found is None:
        said = "nothing" if note is None else ast.unparse(note)
        raise VerifyError(
            f'{where} says {said} of its argument {argument.arg}; wanted "device", "size s0" or "float32 [s0, 64]", the last '
            'with ", trained", ", gradient" or ", tap" where that holds'
        )
    return found


@dataclass(kw_only=True)
class _Renamed(ast.NodeTransformer):
    """AST transformer that renames arguments and values of a function to a0, a1, ... and v0, v1, ..."""

    where: str
    names: dict[str, str]
    """Old names -> new names, of all names met so far."""
    local: frozenset[str]
    """All names that the function assigns."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.local and node.id not in self.names:
            self.names[node.id] = f"v{len(self.names)}"
        if node.id not in self.names and node.id not in _KNOWN:
            raise VerifyError(
                f"line {node.lineno}: {self.where} reads {node.id}, which is neither an argument nor a value of its own; "
                f"beside these it may read {', '.join(sorted(_KNOWN))}"
            )
        return ast.Name(id=self.names.get(node.id, node.id), ctx=node.ctx)


def _is_left_out(node: ast.stmt) -> bool:
    # `del` frees no memory in compiled code.
    return isinstance(node, ast.Delete) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


@dataclass(kw_only=True)
class _Symbols:
    """Renames size symbols to n0, n1, ... in the order of their first use."""

    found: dict[str, str] = field(default_factory=dict)

    def in_text(self, description: str) -> str:
        if description.startswith("size "):
            return f"size {self._in_size(description.removeprefix('size '))}"
        head, bracket, rest = description.partition("[")
        shape, end, role = rest.rpartition("]")
        return f"{head}{bracket}{self._in_size(shape)}{end}{role}"

    def _in_size(self, text: str) -> str:
        return _SYMBOL.sub(lambda match: self.found.setdefault(match[0], f"n{len(self.found)}"), text)


def _sizes(arguments: tuple[LayerArgument, ...]) -> Iterator[str]:
    # Equal dims are asserted, so that a compiler need not find out.
    first: dict[str, str] = {}
    for at, argument in enumerate(arguments):
        if argument.is_size:
            yield f"a{at} = a{at}.shape[0]"
        for dim, size in enumerate(argument.sizes):
            if not size.isidentifier():
                continue
            this = f"a{at}" if argument.is_size else f"a{at}.shape[{dim}]"
            if first.setdefault(size, this) != this:
                yield f"torch._check({this} == {first[size]})"


def _split(shape: str) -> Iterator[str]:
    # Commas inside brackets do not separate sizes.
    depth, size = 0, ""
    for letter in shape:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            yield size.strip()
            size = ""
        else:
            size += letter
    if size.strip():
        yield size.strip()
