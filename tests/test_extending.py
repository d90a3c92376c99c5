"""The script of docs/extending.md runs, and what it prints is what its passes, rules and strategies decide."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def test_every_extension_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/extending.md").read_text(), re.M | re.S)
    (tmp_path / "extending.py").write_text("\n".join(blocks))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MMCOMPILE_DEBUG": "1"}
    command = [sys.executable, "-P", "extending.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 calls of gelu by tanh" in done.stdout
    assert "pass reads-costs requires cost, which nothing before it ensures" in done.stdout
    assert "even_cuts" in done.stdout
    assert "[[5.]" in done.stdout
    for name in ("tanh-gelu", "op-costs", "cost", "gradient-flow"):
        assert f"pass {name}: " in done.stderr
