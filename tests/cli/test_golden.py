"""The command line is frozen: help of every command, and the schema of configuration files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
from support.processes.cli_run import Run

from mmcompile.cli.command_group import COMMANDS
from mmcompile.cli.config_file import SECTIONS
from mmcompile.cli.config_options import field_docs, flag

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, run: Run, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = run(*filter(None, [command]), "--help")
    assert shown.code == 0
    golden(
        f"help_{command or 'mmcompile'}.txt", "\n".join(line.rstrip() for line in shown.out.splitlines()).strip("\n")
    )


def test_schema_of_configuration_files(golden: Golden) -> None:
    lines: list[str] = []
    for section, kind in SECTIONS.items():
        lines += [f"{section}: {kind.__name__}"]
        for own in fields(kind):
            doc = field_docs()[kind.__name__][own.name].replace("\n", " ")
            lines += [f"  {own.name}: {own.type} = {own.default!r}  ({flag(own)})", f"    {doc}"]
    golden("config_schema.txt", "\n".join(lines))
