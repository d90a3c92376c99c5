"""Imports point down only; the links resolve; `import mmcompile` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mmcompile"
LINKS = ("passes", "costmodel", "kernels")

# Lowest first. Prefixes of one row may import each other and everything below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("mmcompile.errors", "mmcompile.units", "mmcompile.files", "mmcompile.config"),
    ("mmcompile.kernels",),
    ("mmcompile.ir",),
    ("mmcompile.costmodel", "mmcompile.data"),
    ("mmcompile.passes",),
    ("mmcompile.planner",),
    ("mmcompile.codegen",),
    ("mmcompile.batching", "mmcompile.runtime"),
    ("mmcompile.captured_model", "mmcompile.planning", "mmcompile.profile", "mmcompile.composition"),
    ("mmcompile.report", "mmcompile.api", "mmcompile.elastic_run", "mmcompile", "mmcompile.cli"),
)


def layer_of(module: str) -> int | None:
    """Row of the longest prefix that fits; None for a module no row names."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for row, prefixes in enumerate(LAYERS):
            if prefix in prefixes:
                # The bare package stands for its __init__ alone: an unnamed submodule must be put in the table.
                return row if prefix != "mmcompile" or len(parts) == 1 else None
    return None


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, imported mmcompile module) of every import in a file, late and type-checking ones included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "mmcompile")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, *filter(None, [base])])
            if base == "mmcompile":
                yield from ((node.lineno, f"mmcompile.{alias.name}") for alias in node.names)
            elif base.startswith("mmcompile."):
                yield node.lineno, base


def upward_imports(source: str, module: str, where: str, *, is_package: bool = False) -> list[str]:
    """One line for each import that points up, or for a module the table lacks."""
    own = layer_of(module)
    if own is None:
        return [f"{where}: {module} is in no layer; add it to LAYERS"]
    problems = []
    for line, imported in imports_of(source, module, is_package=is_package):
        target = layer_of(imported)
        if target is None or target > own:
            problems.append(f"{where}:{line}: {module} imports {imported}, which is above it")
    return problems


def modules() -> Iterator[tuple[str, Path]]:
    """(module name, file) of the whole package, through its links."""
    roots = [PACKAGE, *(PACKAGE / link for link in LINKS)]
    files = {PACKAGE / file.relative_to(PACKAGE) for root in roots for file in root.rglob("*.py")}
    for file in sorted(files):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def test_imports_point_down() -> None:
    problems: list[str] = []
    seen = 0
    for module, file in modules():
        seen += 1
        where = str(file.relative_to(PACKAGE.parent))
        problems += upward_imports(file.read_text(), module, where, is_package=file.name == "__init__.py")
    assert seen > 20, "the package was not found"
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
    (problem,) = upward_imports(source, module, "x.py")
    assert expected in problem


def test_downward_and_sideways_imports_pass() -> None:
    source = (
        "from mmcompile.errors import PlanError\nfrom mmcompile.planner.schedule.schedule import Flow\nimport torch\n"
    )
    assert upward_imports(source, "mmcompile.planner.strategies.search", "x.py") == []


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
