"""The README's tour runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

README = (ROOT / "README.md").read_text()


def test_the_tour_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) == 13
    (tmp_path / "tour.py").write_text('if __name__ == "__main__":\n' + _indented("\n".join(blocks)))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "tour.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "['vision_tower', 'multi_modal_projector', 'language_model']" in done.stdout
    assert "class Stage(StageModule)" in done.stdout
    assert "any 4..5 nodes can be used in full; below 4 training stops" in done.stdout
    assert "died with signal 9 (SIGKILL)" in done.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^):#]+)\)", README))
def test_links_resolve(target: str) -> None:
    assert (ROOT / target).exists()


def test_every_make_target_named_exists() -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z-]+)", README)) <= set(rules)


def _indented(text: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
