"""Lint of docstrings: `python tests/structure/prose.py` prints what to rewrite, and fails if there is any.

Documentation, hover text and `help()` show a docstring without the code beside it, so it must not continue a
sentence that only the source shows: none begins with a word of `OPENERS`. Nor has any a phrase of `PHRASES`.
The length of lines is ruff's to check.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "costmodel", "passes", "mmcompile")

OPENERS = re.compile(
    r"\s*(Of|For|By|To|That|Those|What|How|If|Whether|Which|Who|Whom|Whose|Where|When|Because|And|Or|But|As)\b"
)

# Things do not speak or wish; a pronoun for an unknown person hides which rank, process or value acts.
PHRASES = {
    r"says?|said": "name the thing: a plan contains, a message names, a field gives",
    r"wants?|wanted": "requires, requested",
    r"knows?|knew|knowing": "has, holds, is independent of",
    r"hears?|heard|hearing": "receives, learns",
    r"(?:tells?|told|telling)(?!\s+apart)": "sends, reports, distinguishes",
    r"nobody|whoever|whomever|everybody|somebody|anybody": "name the ranks, processes or nodes",
    r"(?:tak(?:e|es|ing)|took) part": "participates; is a member, runs, sends",
    r"(?:go|goes|going|went) on": "continues",
    r"(?:come|comes|coming|came) by": "arrives, is found",
    r"whatever": "regardless of, any, every",
}
_PHRASE = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE)
_QUOTED = re.compile(r"``?[^`]*``?|\"[^\"\n]*\"")
_ARGUMENT = re.compile(r"^\s+\**\w+(?:, \**\w+)*:", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """A docstring and where it stands."""

    line: int
    name: str
    """Qualified name in the module of what is documented; empty for the module."""
    text: str


def docstrings(source: str) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes and functions, and its fields (a string after an assignment)."""
    yield from _of_scope(ast.parse(source), "")


def _of_scope(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Docstring]:
    prefix = f"{name}." if name else ""
    for index, statement in enumerate(node.body):
        before = node.body[index - 1] if index else None
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            if isinstance(text := statement.value.value, str) and index == 0:
                yield Docstring(line=statement.lineno, name=name, text=text)
            elif isinstance(text, str) and isinstance(before, ast.Assign | ast.AnnAssign):
                target = before.targets[0] if isinstance(before, ast.Assign) else before.target
                yield Docstring(line=statement.lineno, name=prefix + ast.unparse(target), text=text)
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_scope(statement, prefix + statement.name)


def problems(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) for every docstring to rewrite."""
    for docstring in docstrings(source):
        if opener := OPENERS.match(docstring.text):
            yield docstring.line, f"{docstring.name or 'module'}: begins with {opener[1]!r}"
        prose = _ARGUMENT.sub("", _QUOTED.sub("", docstring.text))
        for phrase in _PHRASE.finditer(prose):
            (advice,) = (text for pattern, text in PHRASES.items() if re.fullmatch(pattern, phrase[0], re.IGNORECASE))
            yield docstring.line, f"{docstring.name or 'module'}: {phrase[0]!r} (better: {advice})"


def product_files() -> Iterator[Path]:
    """Yield every Python file of the product, each once (the links in `mmcompile/` are not followed)."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in file.parents):
                yield file


def found() -> list[str]:
    """Return the problems of the product, one line each."""
    return [
        f"{file.relative_to(ROOT)}:{line}: {problem}"
        for file in product_files()
        for line, problem in problems(file.read_text())
    ]


def main() -> int:
    """Print the problems of the product; return 1 if there are any."""
    lines = found()
    print("\n".join(lines), end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
