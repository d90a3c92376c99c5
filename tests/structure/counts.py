"""Size of the product, by folder: `python -P tests/structure/counts.py`."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.product import Module, modules  # noqa: E402  (the path comes first)

MAX_LINES = 67_800  # until captures of single batches go
MAX_CLASSES = 695
MAX_FILES = 22
"""Python files in one folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of some source files."""

    files: int
    lines: int
    classes: int
    functions: int
    bare: int
    """Functions without a docstring."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            files=self.files + other.files,
            lines=self.lines + other.lines,
            classes=self.classes + other.classes,
            functions=self.functions + other.functions,
            bare=self.bare + other.bare,
        )


NONE = Counts(files=0, lines=0, classes=0, functions=0, bare=0)


def counts_of(module: Module) -> Counts:
    """Return the counts of one file; nested classes and functions count too."""
    nodes = list(ast.walk(module.tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Counts(
        files=1,
        lines=module.file.read_text().count("\n"),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        functions=len(functions),
        bare=sum(ast.get_docstring(node) is None for node in functions),
    )


def by_folder() -> dict[str, Counts]:
    """Return the counts of each folder without its subfolders."""
    found: dict[str, Counts] = {}
    for module in modules().values():
        found[module.folder] = found.get(module.folder, NONE) + counts_of(module)
    return dict(sorted(found.items()))


def file_names() -> dict[str, list[str]]:
    """Return the paths of each file name, `__init__.py` apart."""
    found: dict[str, list[str]] = {}
    for module in modules().values():
        if not module.is_package:
            found.setdefault(module.file.name, []).append(module.where)
    return found


def class_names() -> dict[str, list[str]]:
    """Return where each class name is defined, private ones included."""
    found: dict[str, list[str]] = {}
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{module.where}:{node.lineno}")
    return found


def _main() -> None:
    folders = by_folder()
    total = sum(folders.values(), NONE)
    print(f"{'folder':<52}{'files':>7}{'lines':>8}{'classes':>9}{'functions':>11}{'without docstring':>19}")
    for folder, row in (*folders.items(), ("total", total)):
        print(f"{folder:<52}{row.files:>7}{row.lines:>8}{row.classes:>9}{row.functions:>11}{row.bare:>19}")
    often = Counter({name: len(where) for name, where in file_names().items()}).most_common(3)
    twice = [name for name, where in class_names().items() if len(where) > 1]
    print(f"\nlines {total.lines:,} of at most {MAX_LINES:,}; classes {total.classes} of at most {MAX_CLASSES}")
    print(f"most files in a folder: {max(row.files for row in folders.values())} of at most {MAX_FILES}")
    print(f"most frequent file names: {', '.join(f'{name} {count}' for name, count in often)}")
    print(f"class names used twice: {', '.join(twice) or 'none'}")


if __name__ == "__main__":
    _main()
