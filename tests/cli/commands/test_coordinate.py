"""A run over several machines, played on the loopback: a coordinator and a process for each node, all by the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes.cli_run import CONFIGS, Run

from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint

SCRIPT = str(Path(sys.executable).parent / "mmcompile")
MODEL, DATA = "examples.digits_llava:build_model", "examples.digits_llava:build_samples"
STEPS = 40


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """What it prints goes to `log` in the folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([SCRIPT, *arguments], cwd=folder, env=environment, stdout=log, stderr=log)


def secret_in(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o600)
    return path


@pytest.mark.slow
def test_nodes_of_a_run_are_processes_of_their_own(tmp_path: Path) -> None:
    """A machine that is killed does not end the run, and neither does a coordinator that is killed and started again."""
    plan = tmp_path / "spot.json"
    planning = start(
        tmp_path,
        "plan",
        MODEL,
        "--cluster",
        "5x1xcpu",
        "--fault-tolerance",
        "1",
        "--microbatches",
        "4",
        "-o",
        str(plan),
    )
    assert planning.wait(120) == 0, (tmp_path / "log").read_text()
    secret, address, out = secret_in(tmp_path), f"127.0.0.1:{free_port()}", tmp_path / "run1"
    serve = ["coordinate", str(plan), "--out", str(out), "--listen", address, "--secret", str(secret)]
    coordinator = start(tmp_path, *serve)
    nodes = [
        start(
            tmp_path,
            *("train", MODEL, "--data", DATA, "--plan", str(plan), "--steps", str(STEPS), "--batch-size", "16"),
            *("--reduction", "fixed", "--save-every", "10", "--out", str(out)),
            *("--coordinator", address, "--node", f"n{number}", "--secret", str(secret)),
        )
        for number in range(5)
    ]
    events = out / "run" / "events.jsonl"
    try:
        await_text(events, '"step":5,', 240)
        nodes[2].send_signal(signal.SIGKILL)
        await_text(events, '"step":12,', 60)
        coordinator.kill()
        coordinator.wait()
        coordinator = start(tmp_path, *serve)
        assert coordinator.wait(120) == 0, (tmp_path / "log").read_text()
        others = [node for node in nodes if node is not nodes[2]]
        assert [node.wait(60) for node in others] == [0] * 4
    finally:
        for process in (coordinator, *nodes):
            process.kill()
            process.wait()
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "committed"] == list(range(1, STEPS + 1))
    saved = checkpoint.saved(out / "run" / "checkpoint")
    assert saved is not None and saved.step == STEPS


def await_text(path: Path, text: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline_s, f"no {text!r} in {path}: {path.read_text() if path.exists() else ''}"
        time.sleep(0.05)


def test_an_address_that_nobody_reaches_is_refused(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = run(
        "plan", str(CONFIGS / "llava-tiny.json"), "--cluster", "4x1xcpu", "--fault-tolerance", "1", "-o", str(plan)
    )
    assert done.code == 0, done.err
    secret = secret_in(tmp_path)
    done = run("coordinate", str(plan), "--out", str(tmp_path), "--listen", "0.0.0.0:29400", "--secret", str(secret))
    assert done.code == 1 and "no address that workers can connect to" in done.err
    secret.chmod(0o644)
    done = run("coordinate", str(plan), "--out", str(tmp_path), "--listen", "127.0.0.1:29400", "--secret", str(secret))
    assert done.code == 1 and "chmod 600" in done.err
