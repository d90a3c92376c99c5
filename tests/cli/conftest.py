"""Runs the command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.processes.cli_run import CONFIGS, Outcome, Run

from mmcompile.cli.main import main


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("plan", "config.json", ...)`."""

    def command(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["mmcompile", *map(str, arguments)])
        # What libraries change while a command runs must not reach the next test.
        monkeypatch.setenv("TQDM_DISABLE", "1")
        with pytest.raises(SystemExit) as exit_:
            main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        # Rich breaks lines at the terminal's width.
        return Outcome(code=int(exit_.value.code or 0), out=captured.out, err=" ".join(captured.err.split()))

    return command


@pytest.fixture
def tiny() -> Path:
    """A LLaVA of 300 thousand parameters."""
    return CONFIGS / "llava-tiny.json"
