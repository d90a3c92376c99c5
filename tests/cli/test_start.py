"""The command starts fast, tells its version, stops in one line, and speaks JSON about bad usage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes.cli_run import CONFIGS, Run

SCRIPT = str(Path(sys.executable).parent / "mmcompile")


@pytest.mark.parametrize("arguments", ["--help", "-h", "--version", "show nothing.json", "passes"])
def test_commands_that_look_at_no_model_load_no_torch(arguments: str) -> None:
    code = (
        "import sys; sys.argv = ['mmcompile', *sys.argv[1:]]\n"
        "from mmcompile.cli.main import main\n"
        "try: main()\n"
        "finally: print('loaded', *{'torch', 'transformers', 'scipy', 'networkx'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments.split()], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded" and done.returncode in (0, 1, 2), done.stdout + done.stderr


def test_import_loads_no_torch_and_names_resolve() -> None:
    code = (
        "import sys, mmcompile; assert 'torch' not in sys.modules\n"
        "assert set(mmcompile.__all__) <= set(dir(mmcompile))\n"
        "assert all(getattr(mmcompile, name).__name__ == name for name in mmcompile.__all__)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_version_and_short_help(run: Run) -> None:
    assert run("--version").out.startswith("mmcompile 0.")
    assert run("-h").out == run("--help").out
    assert run("plan", "-h").out == run("plan", "--help").out


@pytest.mark.parametrize(
    "arguments", ["show --json", "show x.json --nope --json", "--nope --json", "plan x --strategy best --json"]
)
def test_bad_usage_is_an_object_too(arguments: str, run: Run) -> None:
    done = run(*arguments.split())
    assert done.code == 2
    assert done.json["error"]["kind"] == "UsageError" and done.json["error"]["message"]


@pytest.mark.parametrize("delay_s", [0.3, 1.0, 2.0, 5.0])
def test_an_interrupt_at_any_moment_is_one_line(delay_s: float, tmp_path: Path) -> None:
    config = str(CONFIGS / "llava-1.5-7b.json")
    command = [SCRIPT, "plan", config, "--cluster", "8x8xH100", "--global-batch", "512", "-o", "plan.json"]
    # A group of its own, as a terminal has one: Ctrl-C goes to every process in it.
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored where a shell runs tests in the background
    )
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())
