"""README and docs: their code runs as it is written, their links lead somewhere, and what is generated is current."""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

PRINTED = {
    "README.md": ("language_model.1",),
    "docs/training.md": ("['vision_tower', 'multi_modal_projector', 'language_model']", "class Stage(StageModule)"),
    "docs/attention.md": ("language_model.1",),
    "docs/composition.md": ("vision_projector",),
    "docs/elastic.md": ("any 4..5 nodes can be used in full; below 4 training stops", "died with signal 9 (SIGKILL)"),
}
"""Page with a script in its code blocks -> texts that the script prints."""
LEFT = {"README.md": ("model/model.safetensors",), "docs/training.md": ("model/model.safetensors", "plan.json")}
"""Page -> files that its script writes."""
TESTED_ELSEWHERE = {"docs/extending.md"}
DOCS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "benchmarks/README.md",
        ROOT / "examples/launch.md",
    )
}
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]*)\)")


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PRINTED)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    script = "\n".join(blocks(DOCS[page]))
    (tmp_path / "script.py").write_text('if __name__ == "__main__":\n' + _indented(script))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [text for text in PRINTED[page] if text not in done.stdout] == []
    assert [name for name in LEFT.get(page, ()) if not (tmp_path / name).is_file()] == []


def test_every_page_with_code_is_tested() -> None:
    assert {page for page, text in DOCS.items() if blocks(text)} - TESTED_ELSEWHERE == set(PRINTED)


@pytest.mark.parametrize("page", DOCS)
def test_links_and_anchors_resolve(page: str) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", DOCS[page])):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue  # another site
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        if not (ROOT / target).exists() or (anchor and anchor not in anchors(DOCS[target])):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", DOCS)
def test_every_make_target_named_exists(page: str) -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z-]+)", DOCS[page])) <= set(rules)


@pytest.mark.parametrize("page", [page for page in DOCS if page != "CHANGELOG.md"])
def test_files_and_folders_named_exist(page: str) -> None:
    """Code in backticks that ends like a file of ours, or with a slash, is a path below the root, the package or the page."""
    named = re.findall(r"`([\w./-]*(?:\.py|/))`", FENCE.sub("", DOCS[page]))
    left_by_runs = ("demo_out", "stages/", "run/", "site/", ".venv")
    roots = (
        ROOT,
        ROOT / "mmcompile",
        (ROOT / page).parent,
        *(path for path in ROOT.glob("mmcompile/*/") if path.is_dir()),
    )
    wanted = [name for name in named if "*" not in name and not name.startswith(left_by_runs)]
    assert [name for name in wanted if not any((root / name).exists() for root in roots)] == []


def test_every_documented_name_imports() -> None:
    for name in re.findall(r"^::: (\S+)$", DOCS["docs/api.md"], re.M):
        module, _, attribute = name.rpartition(".")
        try:
            assert hasattr(importlib.import_module(module), attribute), name
        except ModuleNotFoundError:
            importlib.import_module(name)


def test_every_public_name_of_the_facade_is_in_the_api_reference() -> None:
    exported = re.findall(r" import \w+ as (\w+)", (ROOT / "mmcompile/__init__.py").read_text())
    documented = set(re.findall(r"^::: mmcompile\.(\w+)$", DOCS["docs/api.md"], re.M))
    assert set(exported) - documented == {"MMCompileError"}, "errors are documented with their module"


def test_the_page_of_the_command_line_is_current() -> None:
    code = "import sys; sys.path.insert(0, 'docs/tools'); import cli_page; sys.stdout.write(cli_page.page())"
    command = [sys.executable, "-P", "-X", "utf8", "-c", code]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert printed == DOCS["docs/cli.md"], "run `make docs`, and read what it changed"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} >= {
        Path(page).stem for page in ROOT.glob("docs/*.md")
    }


def test_the_readme_is_short() -> None:
    assert len(DOCS["README.md"].splitlines()) <= 150


def _indented(text: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
