"""Every benchmark can be started as the Makefile does, by `python -P`, which keeps its folder off the search path."""

from __future__ import annotations

import subprocess
import sys

from support.paths import ROOT

_EACH = """
import runpy, sys
from pathlib import Path

path, failed = list(sys.path), []
folder = Path("benchmarks")
siblings = {file.stem for file in folder.glob("*.py")}
for file in sorted(folder.glob("*.py")):
    if '__name__ == "__main__"' not in file.read_text():
        continue
    sys.path[:] = path
    for name in siblings & set(sys.modules):
        del sys.modules[name]
    try:
        runpy.run_path(str(file), run_name="imported")
    except ModuleNotFoundError as error:
        failed.append(f"{file}: {error}")
print("\\n".join(failed))
"""


def test_every_benchmark_finds_what_it_imports() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _EACH], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""
