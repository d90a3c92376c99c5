"""Hooks of mkdocs: pages that stand outside docs/, and links that lead there.

README, CHANGELOG, benchmarks/README.md and examples/launch.md become pages of the site; other files of the repository that a page
links to are copied into it. On a page of the repository the same links work as they stand.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/launch.md": "launch.md",
}
"""File of the repository -> page of the site."""
COPIES = "repository"
"""Folder of the site with copies of linked files."""
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside docs/, and the files that any page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    linked = {_target(file.src_uri, link[1]) for file in files.documentation_pages() for link in _links(file)}
    for path in sorted(linked):
        if path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file():
            files.append(File.generated(config, f"{COPIES}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to files of the repository at their pages or copies in the site."""
    uri = page.file.src_uri

    def pointed(match: re.Match[str]) -> str:
        return match[1] + _in_site(uri, match[2]) + match[3]

    return _LINK.sub(pointed, markdown)


def _links(file: File) -> list[tuple[str, str, str]]:
    return _LINK.findall(file.content_string)


def _target(uri: str, link: str) -> str:
    """Return the path in the repository that a link of a page means."""
    sources = {page: source for source, page in PAGES.items()}
    return posixpath.normpath(posixpath.join(posixpath.dirname(sources.get(uri, f"docs/{uri}")), link))


def _in_site(uri: str, link: str) -> str:
    path = _target(uri, link)
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{COPIES}/{path}" if (ROOT / path).is_file() else link
