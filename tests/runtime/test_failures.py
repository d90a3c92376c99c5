"""A rank that dies, fails or is interrupted ends everything within seconds, with one message that says where."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.paths import TESTS
from support.processes.control_jobs import children

from mmcompile.errors import EngineError
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.engine import Engine

TWO_RANKS = {"lm0": 0, "lm1": 1, "lm2": 0}
SECOND_STEP = "self.calls = getattr(self, 'calls', 0) + 1; import os; self.calls < 7 or "
"""Precedes an expression evaluated in microbatch 2 of step 2."""


def run_until_error(plan: Placement, fault: str) -> tuple[str, float, Engine]:
    """Message of the EngineError that ends training, and how long its step took. No process is left behind."""
    before = set(children(os.getpid()))
    engine = Engine(plan, HandSource(HandModel(), fault))
    for _ in range(2):
        start = time.monotonic()
        try:
            engine.step(hand_samples(4))
        except EngineError as error:
            assert set(children(os.getpid())) <= before
            return str(error), time.monotonic() - start, engine
    pytest.fail("two steps ran without an error")


def alive(pid: int) -> bool:
    """False too for a zombie, which only waits to be counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_killed_worker_is_named_with_stage_step_and_action() -> None:
    message, seconds, engine = run_until_error(hand_plan(**TWO_RANKS), SECOND_STEP + "os.kill(os.getpid(), 9)")
    assert message.startswith("rank 1 (stage language_model.1) died with signal 9 (SIGKILL) in step 2 while F2; ")
    assert seconds < 3
    with pytest.raises(EngineError, match="died with signal 9"):
        engine.step(hand_samples(4))
    engine.close()


def test_exception_in_a_stage_of_a_worker_is_reported_with_its_source_line() -> None:
    plan = hand_plan(lm0=0, lm1=1, lm2=2)
    message, seconds, _ = run_until_error(plan, SECOND_STEP + "self.t['no such tensor']")
    assert message.startswith("rank 1 (stage language_model.1) failed in step 2 while F2: KeyError: 'no such tensor'; ")
    assert "self.calls < 7 or self.t['no such tensor']" in message
    assert seconds < 3


@pytest.mark.slow
def test_exception_in_a_stage_of_rank_0() -> None:
    plan = hand_plan(lm0=1, lm1=0, lm2=1)
    message, seconds, _ = run_until_error(plan, SECOND_STEP + "self.t['no such tensor']")
    assert message.startswith("rank 0 (stage language_model.1) failed in step 2 while F2: KeyError: 'no such tensor'; ")
    assert seconds < 3


SCRIPT = """
import signal

# A shell starts what it runs in the background with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from mmcompile.runtime.engine import Engine

engine = Engine(hand_plan(lm0=0, lm1=1, lm2=0), HandSource(HandModel(), "import time; time.sleep(60)"))
print("ready", flush=True)
engine.step(hand_samples(4))
"""


def started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_a_step() -> tuple[subprocess.Popen[str], list[int]]:
    """Rank 0, and its descendants: the process that forks workers, and the one worker."""
    process = started()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (parent,) = children(process.pid)
    workers = children(parent)
    assert len(workers) == 1
    time.sleep(0.3)  # Into the step, so that both ranks wait for the sleeping stage.
    return process, [parent, *workers]


def await_end(pids: list[int]) -> None:
    start = time.monotonic()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() - start < 40
        time.sleep(0.02)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_signal_to_rank_0_in_a_step_leaves_no_process_behind(number: signal.Signals) -> None:
    process, others = in_a_step()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert ("KeyboardInterrupt" in errors) == (number is signal.SIGINT)
    await_end(others)
    assert process.returncode == -number


def test_without_the_process_that_forks_workers_a_step_ends() -> None:
    process, others = in_a_step()
    os.kill(others[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert "EngineError: rank 1 (stage language_model.1) died with signal 9 (SIGKILL) in step 1" in errors
    await_end(others)
    assert process.returncode == 1


def test_ctrl_c_while_workers_load_leaves_no_process_behind() -> None:
    process = started()
    while not (others := children(process.pid)):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    await_end(others)
    assert process.returncode == -signal.SIGINT
