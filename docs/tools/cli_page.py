"""Write docs/cli.md, the reference of the command line, from what `--help` prints: `python -P docs/tools/cli_page.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from mmcompile.cli.main import EXAMPLES, app

PAGE = Path(__file__).parents[1] / "cli.md"
COLUMNS = 120
HEAD = """# Command line

`mmcompile COMMAND …`; made by `make docs` from what `--help` prints. Every command has `--json`.

MODEL is a `config.json`, a folder with one, a Hugging Face id in the local cache, or `package.module:function` returning a
model or (model, batch). DATA is a folder with a `.safetensors` file for each sample, or `package.module:function` returning a
list of samples.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a problem was found; the message says what to do. `MMCOMPILE_DEBUG=1` adds the traceback, `--json` prints it as an object |
| 2 | bad usage |
"""


def page() -> str:
    """Return the text of docs/cli.md."""
    return "\n".join([HEAD, *(line for name in EXAMPLES for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"```\n{_help(name)}\n```\n"
    yield "Examples:\n"
    lines = "\n".join(EXAMPLES[name])
    yield f"```\n{lines}\n```\n"


def _help(name: str) -> str:
    """Return the help of a command without its examples, as a terminal of `COLUMNS` columns shows it."""
    environment = {"COLUMNS": str(COLUMNS), "TERM": "dumb", "TERMINAL_WIDTH": str(COLUMNS)}
    printed = CliRunner().invoke(app, [name, "--help"], prog_name="mmcompile", env=environment)
    assert printed.exit_code == 0, printed.output
    text, _, _ = printed.output.partition("\n Examples")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).strip("\n")


if __name__ == "__main__":
    PAGE.write_text(page())
