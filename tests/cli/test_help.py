"""Help texts: complete, and their examples work."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes.cli_run import Run

from mmcompile.cli.command_group import EXAMPLES


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_shows_its_examples(command: str, run: Run) -> None:
    outcome = run(command, "--help")
    assert outcome.code == 0
    shown = " ".join(re.sub(r"\\\s*\n", " ", outcome.out).split())
    for example in EXAMPLES[command]:
        assert example in shown


@pytest.mark.slow
def test_examples_run_as_they_stand(tmp_path: Path) -> None:
    """In a folder that looks like a checkout, one after another."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = str(Path(sys.executable).parent / "mmcompile")
    for example in (one for command, examples in EXAMPLES.items() if command != "coordinate" for one in examples):
        name, *arguments = shlex.split(example)
        assert name == "mmcompile"
        done = subprocess.run([script, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{example}\n{done.stderr}"
