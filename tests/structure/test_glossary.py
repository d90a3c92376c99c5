"""Names: words coined here stand in docs/glossary.md; words of class names are standard vocabulary, or stand there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS

COINED = (
    "arrival order",
    "assignment",
    "balance group",
    "batch inputs",
    "block plan",
    "carried sums",
    "chain",
    "commit",
    "deferral",
    "fence",
    "fingerprint",
    "generation",
    "head stride",
    "island",
    "known values",
    "layer copies",
    "layer kind",
    "layer store",
    "mask words",
    "master weights",
    "meta model",
    "owner set",
    "pattern",
    "program cache",
    "regather",
    "resilience",
    "row exchange",
    "stage program",
    "step plan",
    "template",
    "token blocks",
    "visible pairs",
    "weight-grad split",
)
"""Words that mean something here that a newcomer cannot know."""
FOLDERS = ("mmcompile", "passes", "kernels", "costmodel")
WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z]*\d*|[A-Z]+")


def glossary() -> set[str]:
    """Return the words of the first column of the glossary's tables, in lower case."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.M)
    return {word.strip("` ") for row in rows for word in re.sub(r"\(.*?\)", "", row.lower()).split(",")}


def vocabulary() -> set[str]:
    """Return the head nouns of class names that need no explanation."""
    lines = (TESTS / "structure/vocabulary.txt").read_text().splitlines()
    return {word for line in lines if not line.startswith("#") for word in line.split()}


def unknown_head(name: str, known: set[str]) -> str | None:
    """Return the last word of a class name if it is neither known, nor known in the plural."""
    head = WORD.findall(name)[-1].lower()
    return None if {head, head.removesuffix("s")} & known else head


def public_classes() -> dict[str, str]:
    """Return public class name -> file, of the whole product."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        node.name: str(path.relative_to(ROOT))
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


@pytest.mark.parametrize("word", COINED)
def test_a_coined_word_stands_in_the_glossary(word: str) -> None:
    assert word in glossary()


def test_the_last_word_of_every_class_name_is_explained() -> None:
    known = vocabulary() | {word for term in glossary() for word in term.split()[-1:]}
    unknown = {name: file for name, file in public_classes().items() if unknown_head(name, known)}
    assert unknown == {}, (
        "explain the last word in docs/glossary.md; tests/structure/vocabulary.txt has the field's standard words"
    )


def test_a_planted_word_is_found() -> None:
    assert unknown_head("LayerZorb", {"layer"}) == "zorb"
    assert unknown_head("HTTPServers", {"server"}) is None


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folders_searched_exist(folder: str) -> None:
    assert list(Path(ROOT / folder).rglob("*.py"))
