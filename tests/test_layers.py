"""Imports point down only and never in circles; the links resolve; `import mmcompile` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import networkx as nx
import pytest
from support.product import LINKS, PACKAGE, import_graph, imports_of, modules

# Lowest first. Prefixes of one row may import each other and everything below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("mmcompile.errors", "mmcompile.units", "mmcompile.files", "mmcompile.config"),
    ("mmcompile.kernels",),
    ("mmcompile.ir",),
    ("mmcompile.costmodel", "mmcompile.data"),
    ("mmcompile.passes",),
    ("mmcompile.planner",),
    ("mmcompile.codegen",),
    ("mmcompile.batching",),
    ("mmcompile.runtime",),
    ("mmcompile.composition", "mmcompile.captured_model", "mmcompile.planning", "mmcompile.profile"),
    ("mmcompile.report", "mmcompile.api", "mmcompile.elastic_run", "mmcompile"),
    ("mmcompile.cli",),
)


def layer_of(module: str) -> int | None:
    """Return the row of the longest prefix that fits; None for a module no row names."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for row, prefixes in enumerate(LAYERS):
            if prefix in prefixes:
                # The bare package stands for its __init__ alone: an unnamed submodule must be put in the table.
                return row if prefix != "mmcompile" or len(parts) == 1 else None
    return None


def upward_imports(tree: ast.Module, module: str, where: str, *, is_package: bool = False) -> list[str]:
    """Return one line for each import that points up, or for a module the table lacks."""
    own = layer_of(module)
    if own is None:
        return [f"{where}: {module} is in no layer; add it to LAYERS"]
    problems = []
    for line, base, name in imports_of(tree, module, is_package=is_package):
        imported = f"{base}.{name}" if base == "mmcompile" and name else base
        target = layer_of(imported)
        if target is None or target > own:
            problems.append(f"{where}:{line}: {module} imports {imported}, which is above it")
    return problems


def mutual_folders(graph: dict[str, dict[str, int]]) -> list[str]:
    """Return each pair of folders that import each other.

    Modules directly in `mmcompile/` are left out: each is a layer of its own.
    """
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = modules()
    for module, targets in graph.items():
        for target in targets:
            pair = known[module].folder, known[target].folder
            if pair[0] != pair[1] and "mmcompile" not in pair:
                edges[pair].append(f"{module} imports {target}")
    return [f"{a} <-> {b}: {edges[a, b][0]}; {edges[b, a][0]}" for a, b in sorted(edges) if a < b and (b, a) in edges]


def import_circles(graph: dict[str, dict[str, int]]) -> list[str]:
    """Return each import inside a strongly connected component of the import graph."""
    edges = nx.DiGraph((module, target) for module, targets in graph.items() for target in targets)
    component = {
        module: number for number, members in enumerate(nx.strongly_connected_components(edges)) for module in members
    }
    return [f"{a} -> {b}" for a, b in sorted(edges.edges) if component[a] == component[b]]


def test_imports_point_down() -> None:
    problems: list[str] = []
    for module in modules().values():
        problems += upward_imports(module.tree, module.name, module.where, is_package=module.is_package)
    assert len(modules()) > 20, "the package was not found"
    assert not problems, "\n".join(problems)


def test_no_two_folders_import_each_other() -> None:
    problems = mutual_folders(import_graph())
    assert not problems, "\n".join(problems)


def test_no_imports_in_a_circle() -> None:
    problems = import_circles(import_graph())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "module", "expected"),
    [
        (
            "import os\nfrom mmcompile.planner.plan.plan import Plan\n",
            "mmcompile.ir.capture",
            "x.py:2: mmcompile.ir.capture imports",
        ),
        (
            "def f():\n    import mmcompile.api\n",
            "mmcompile.runtime.engine",
            "x.py:2: mmcompile.runtime.engine imports",
        ),
        ("from ..passes import cost\n", "mmcompile.costmodel.compute", "imports mmcompile.passes"),
        ("from mmcompile import api\n", "mmcompile.codegen.source", "imports mmcompile.api"),
        ("", "mmcompile.novel.thing", "is in no layer"),
    ],
)
def test_a_planted_upward_import_is_reported(source: str, module: str, expected: str) -> None:
    (problem,) = upward_imports(ast.parse(source), module, "x.py")
    assert expected in problem


def test_downward_and_sideways_imports_pass() -> None:
    source = (
        "from mmcompile.errors import PlanError\nfrom mmcompile.planner.schedule.schedule import Flow\nimport torch\n"
    )
    assert upward_imports(ast.parse(source), "mmcompile.planner.strategies.search", "x.py") == []


def test_a_planted_circle_is_reported() -> None:
    names = [name for name, module in modules().items() if name.startswith("mmcompile.ir.") and not module.is_package]
    other = next(name for name in modules() if name.startswith("mmcompile.data."))
    first, second = names[:2]
    planted = {first: {second: 1}, second: {first: 1, other: 1}, other: {}}
    assert import_circles(planted) == [f"{first} -> {second}", f"{second} -> {first}"]
    (pair,) = mutual_folders({first: {other: 1}, other: {second: 1}})
    assert pair.startswith("mmcompile.data <-> mmcompile.ir: ")


@pytest.mark.parametrize("name", LINKS)
def test_link_resolves(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink(), f"{link} must be a link to ../{name}: check out with links enabled"
    assert link.readlink() == Path("..") / name
    assert (link / "__init__.py").is_file(), f"{link} leads nowhere"


def test_import_is_light() -> None:
    """Workers start through `import mmcompile`, on machines that need not have these."""
    heavy = ["transformers", "matplotlib", "peft", "typer", "z3", "sklearn"]
    code = f"import sys, mmcompile, mmcompile.runtime; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
