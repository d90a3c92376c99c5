"""Graph inside one stage, read back from its source: a node for each layer, and for the code between layers.

The source is the truth (it is what runs), so nothing else has to be kept to draw it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from mmcompile.planner.plan.layout import Node, lay_out
from mmcompile.report.pictures.svg import Svg, dot_text

_INPUT, _OUTPUT = "input", "output"


@dataclass(frozen=True, kw_only=True, slots=True)
class StatementGroup:
    """Consecutive statements of a stage's `forward` under one comment."""

    title: str
    """Comment above the statements: the path of a layer or module, or the meaning of a shared value."""
    ops: tuple[str, ...]
    """Operations of the statements; for a call of a layer function, those of the function."""
    reads: tuple[str, ...]
    """Names of values that the group reads and others compute."""
    writes: tuple[str, ...]
    """Names of values that the group computes and others read."""


def program_groups(source: str) -> tuple[StatementGroup, ...]:
    """Return the statement groups in the `forward` of a stage program's source, in order; inputs first, outputs last."""
    module = ast.parse(source)
    forward, layers = _forward(module), _layers(module)
    titles = _titles(source.splitlines(), forward)
    drafts: list[tuple[str, list[ast.stmt]]] = []
    for statement, title in zip(forward.body, titles, strict=True):
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
            if not drafts or drafts[-1][0] != title:
                drafts.append((title, []))
            drafts[-1][1].append(statement)
    inputs = tuple(argument.arg for argument in forward.args.args if argument.arg != "self")
    results = tuple(name for s in forward.body if isinstance(s, ast.Return) for name in _names(s, ast.Load))
    groups = [_group(title, statements, layers) for title, statements in drafts]
    read_later = {name for group in groups for name in group.reads} | set(results)
    kept = (replace(g, writes=tuple(name for name in g.writes if name in read_later)) for g in groups)
    first = StatementGroup(title=_INPUT, ops=(), reads=(), writes=inputs)
    return (first, *kept, StatementGroup(title=_OUTPUT, ops=(), reads=tuple(dict.fromkeys(results)), writes=()))


def program_text(source: str) -> str:
    """Return a text block for each statement group of a stage program's source, as a layer: path, inputs, operations, outputs."""
    blocks = []
    for index, group in enumerate(program_groups(source)):
        lines = [f"[{index}] {group.title}"]
        lines += [f"    reads   {', '.join(group.reads)}"] if group.reads else []
        lines += [f"    runs    {', '.join(group.ops)}"] if group.ops else []
        lines += [f"    hands on {', '.join(group.writes)}"] if group.writes else []
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def program_dot(source: str, name: str) -> str:
    """Return Graphviz text of a stage program: its statement groups as nodes, edges labelled with the values passed on.

    `source`: Python source of the program. `name`: title of the graph.
    """
    groups = program_groups(source)
    lines = [f"digraph {dot_text(name)} {{", '  node [shape=box, fontname="monospace"];']
    for index, group in enumerate(groups):
        lines.append(f"  n{index} [label={dot_text(_label(group))}, tooltip={dot_text(', '.join(group.ops))}];")
    for source_index, target, values in _edges(groups):
        lines.append(f"  n{source_index} -> n{target} [label={dot_text(', '.join(values))}];")
    return "\n".join([*lines, "}"])


def program_svg(source: str) -> str:
    """Return an SVG file of a stage program's source: a box for each statement group, left to right along the longest path."""
    groups = program_groups(source)
    edges = _edges(groups)
    columns = [0] * len(groups)
    for start, end, _ in edges:
        columns[end] = max(columns[end], columns[start] + 1)
    taken: dict[int, int] = {}
    nodes = []
    for index, group in enumerate(groups):
        row = taken[columns[index]] = taken.get(columns[index], -1) + 1
        nodes.append(Node(name=str(index), column=columns[index], row=row, lines=tuple(_label(group).split("\n"))))
    svg = Svg(lay_out(nodes, [(str(start), str(end)) for start, end, _ in edges]))
    values = {(str(start), str(end)): ", ".join(names) for start, end, names in edges}
    paths = [svg.path(path, escape(values[path.source, path.target]), dashed=False) for path in svg.layout.paths]
    return svg.document([*paths, *(part for box in svg.layout.boxes for part in svg.box(box, "#445566"))])


def _label(group: StatementGroup) -> str:
    shared = re.fullmatch(r"shared value, .*\(from (.*)\)", group.title)
    title = f"shared: {shared[1]}" if shared else group.title.partition(",")[0]
    return f"{title}\n{len(group.ops)} ops" if group.ops else title


def _edges(groups: Sequence[StatementGroup]) -> list[tuple[int, int, list[str]]]:
    made: dict[str, int] = {}
    edges: dict[tuple[int, int], list[str]] = {}
    for index, group in enumerate(groups):
        for name in group.reads:
            edges.setdefault((made[name], index), []).append(name)
        made.update(dict.fromkeys(group.writes, index))
    return [(start, end, names) for (start, end), names in edges.items()]


def _forward(module: ast.Module) -> ast.FunctionDef:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == "Stage":
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "forward":
                    return item
    raise AssertionError("a stage program's source has a class Stage with a forward")


def _layers(module: ast.Module) -> dict[str, tuple[str, ...]]:
    """Return name of each layer function in a stage's source -> names of the operations that it calls."""
    return {
        node.name: tuple(op for statement in node.body for op in _ops(statement))
        for node in module.body
        if isinstance(node, ast.FunctionDef)
    }


def _ops(statement: ast.AST) -> Iterator[str]:
    yield from (ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))


def _titles(lines: Sequence[str], forward: ast.FunctionDef) -> Iterator[str]:
    title, line = "", forward.lineno
    for statement in forward.body:
        comments = [text.strip() for text in lines[line : statement.lineno - 1] if text.strip().startswith("#")]
        title = comments[-1].lstrip("# ") if comments else title
        line = statement.end_lineno or statement.lineno
        yield title


def _group(title: str, statements: Sequence[ast.stmt], layers: Mapping[str, tuple[str, ...]]) -> StatementGroup:
    written: dict[str, None] = {}
    read: dict[str, None] = {}
    ops = []
    for statement in statements:
        names = _names(statement, ast.Load)
        called = [name for name in names if name in layers]
        read |= dict.fromkeys(name for name in names if name not in written and name not in layers)
        written |= dict.fromkeys(_names(statement, ast.Store))
        ops += layers[called[0]] if called else _ops(statement)
    return StatementGroup(title=title, ops=tuple(ops), reads=tuple(read), writes=tuple(written))


_MODULES = ("self", "aten", "torch", "mm", "math", "operator")


def _names(statement: ast.AST, context: type[ast.expr_context]) -> list[str]:
    """Return the names of values that a statement reads (`context` is `ast.Load`) or writes (`ast.Store`), in source order."""
    found = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, context)]
    found.sort(key=lambda name: (name.lineno, name.col_offset))
    return list(dict.fromkeys(name.id for name in found if name.id not in _MODULES))
