"""The product's source as syntax trees: its modules, who imports whom, and what each module makes public."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.paths import ROOT

PACKAGE = ROOT / "mmcompile"
LINKS = ("passes", "costmodel", "kernels")
"""Folders of the root that the package reaches through links."""

_REGISTERING = re.compile(r"custom_op|register_|triton\.jit|\.command\b")
"""Decorators through which torch, Triton or typer hold a function: it needs no importer."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file of the product."""

    name: str
    """Dotted import name."""
    file: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether the file is an `__init__.py`."""
        return self.file.name == "__init__.py"

    @property
    def folder(self) -> str:
        """Dotted name of the folder that holds the file."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def where(self) -> str:
        """Path below the checkout, for messages."""
        return str(self.file.relative_to(PACKAGE.parent))


@cache
def modules() -> dict[str, Module]:
    """Return every module of the package by name, the linked folders included."""
    roots = [PACKAGE, *(PACKAGE / link for link in LINKS)]
    found = {}
    for file in sorted({PACKAGE / file.relative_to(PACKAGE) for root in roots for file in root.rglob("*.py")}):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name=name, file=file, tree=ast.parse(file.read_text()))
    return found


def imports_of(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[int, str, str | None]]:
    """Yield (line, mmcompile module, name taken from it or None) of every import, late and type-checking ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name, None) for alias in node.names if alias.name.split(".")[0] == "mmcompile"
            )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            if base.split(".")[0] == "mmcompile":
                yield from ((node.lineno, base, alias.name) for alias in node.names)


@cache
def import_graph() -> dict[str, dict[str, int]]:
    """Return, for each module, the product's modules that it imports with the line of one import."""
    known = modules()
    graph: dict[str, dict[str, int]] = {name: {} for name in known}
    for module in known.values():
        for line, base, name in imports_of(module.tree, module.name, is_package=module.is_package):
            target = f"{base}.{name}" if name and f"{base}.{name}" in known else base
            if target in known and target != module.name:
                graph[module.name][target] = line
    return graph


def public_definitions(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the public classes, functions and constants that a module defines at its top level."""
    for node in module.tree.body:
        names: list[str] = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from ((name, node) for name in names if not name.startswith("_"))


def names_used_by(tree: ast.Module, module: str, *, is_package: bool) -> set[tuple[str, str]]:
    """Return (module, name) of all names that a file takes from product modules, by import or as an attribute of a module."""
    used: set[tuple[str, str]] = set()
    aliases: dict[str, str] = {}
    known = modules()
    for _, base, name in imports_of(tree, module, is_package=is_package):
        if name is not None:
            used.add((base, name))
            if f"{base}.{name}" in known:
                aliases[name] = f"{base}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            aliases |= {a.asname: aliases[a.name] for a in node.names if a.asname and a.name in aliases}
        elif isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and a.name in known}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            used.add((aliases[node.value.id], node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr" and len(node.args) == 3:
            owner, name = ast.unparse(node.args[0]), ast.unparse(node.args[1]).strip("'")
            used.add((aliases.get(owner, owner), name))
    return used


def annotated_names(module: Module) -> set[str]:
    """Return the names in a module's annotations and base classes: types that callers receive without importing them."""
    annotations: list[ast.expr | None] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AnnAssign | ast.arg):
            annotations.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            annotations += node.bases
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript):
            annotations.append(node.value)  # `Action = Strike | Stall`
    found: set[str] = set()
    for annotation in filter(None, annotations):
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"\w+", node.value))
    return found


def exported_names(module: Module) -> set[str]:
    """Return the names in a module's `__all__`."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


@cache
def entry_points() -> frozenset[tuple[str, str]]:
    """Return (module, function) of what a shell or an interpreter calls: project scripts and `python -m` modules."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    found = {(module, function) for module, _, function in (script.partition(":") for script in scripts)}
    for module in modules().values():
        for node in module.tree.body:
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                found |= {(module.name, name.id) for name in ast.walk(node) if isinstance(name, ast.Name)}
    return frozenset(found)


def _needs_no_importer(name: str, node: ast.stmt, annotated: set[str]) -> bool:
    """Return whether a definition is used without an import: a type in signatures, an error, a registered operator, an alias."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return any(_REGISTERING.search(ast.unparse(decorator)) for decorator in node.decorator_list)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
        return True  # `aten = torch.ops.aten`
    if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("TypeVar(", "ParamSpec(")):
        return True
    is_error = isinstance(node, ast.ClassDef) and any(
        ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases
    )
    return is_error or (name in annotated and not name.isupper())


_IMPORT_ON_A_PAGE = re.compile(r"^from (mmcompile[\w.]*) import ([\w, ]+)$", re.M)


@cache
def names_on_pages() -> frozenset[tuple[str, str]]:
    """Return (module, name) of what the documentation's examples import."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [match for page in pages for match in _IMPORT_ON_A_PAGE.findall(page.read_text())]
    return frozenset((module, name.split(" as ")[0].strip()) for module, names in found for name in names.split(","))


@cache
def names_used_by_folder(folder: str) -> frozenset[tuple[str, str]]:
    """Return (module, name) of what a folder outside the product takes from it."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / folder).rglob("*.py"))
    return frozenset(used for tree in trees for used in names_used_by(tree, "outside", is_package=False))


def unused_public_names() -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every public name without an importer in the product.

    No importer is needed by a name of a facade (`__all__`, `mmcompile/__init__.py`), an entry point, an operator that
    torch, Triton or typer hold, an error, a type in a signature of its own module, a name that a benchmark, an example or
    the documentation takes, or one that its own module uses and a test takes.
    """
    used = (entry_points() | names_on_pages()).union(*map(names_used_by_folder, ("benchmarks", "examples", "docs")))
    strings: set[str] = set()
    for module in modules().values():
        used |= names_used_by(module.tree, module.name, is_package=module.is_package)
        strings |= {
            node.value
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("mmcompile.")
        }
    for module in modules().values():
        public = exported_names(module)
        annotated = annotated_names(module)
        read = {
            node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        for name, node in public_definitions(module):
            in_table = f"{module.name}:{name}" in strings or (name == "main" and module.name in strings)
            if name in public or in_table or (module.name, name) in used:
                continue
            if name in read and (module.name, name) in names_used_by_folder("tests"):
                continue
            if not _needs_no_importer(name, node, annotated):
                yield module.name, name
