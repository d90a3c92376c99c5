"""Pipelines of unlike templates, one of which loses a node on the way, train exactly as one process does.

The second step has no media at all. A worker is killed in that step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from support.oracles.one_process import ADAMW
from support.parity.layouts import PARTS, Freeze
from support.parity.three_steps import assert_same_parameters, in_one_process, model_of, steps_of

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.planner.plan.plan import Plan
from mmcompile.runtime.monitoring.fail_points import VARIABLE, FaultAction, Strike

TOLERANCE = 1e-9
MICROBATCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on pipelines of `smallest` and `smallest + 1` nodes."""

    family: str
    freeze: Freeze
    smallest: int = 2
    victim: int = 0
    """Rank."""

    def __str__(self) -> str:
        return f"{self.family}-freeze_{self.freeze}"


CORE = [
    Case(family="llava", freeze=Freeze.ENCODER, victim=3),
]
REST = [
    Case(family="qwen3_vl", freeze=Freeze.NONE, victim=0),
    Case(family="two_encoder_net", freeze=Freeze.NONE, smallest=3, victim=2),
    Case(family="gemma3", freeze=Freeze.NONE, victim=1),
    Case(family="mllama", freeze=Freeze.ENCODER, victim=4),
    Case(family="qwen2_5_vl", freeze=Freeze.ENCODER_AND_LANGUAGE_MODEL, victim=2),
    Case(family="qwen2_audio", freeze=Freeze.ENCODER, victim=0),
]
CASES = [*CORE, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)]


def planned(case: Case) -> Plan:
    """A plan whose only templates have `smallest` and one more nodes."""
    nodes = 2 * case.smallest + 1
    made = mm.plan(
        model_of(case.family, case.freeze),
        collate(steps_of(case.family, num_microbatches=MICROBATCHES)[0][:2]),
        cluster=f"{nodes}x1xcpu",
        num_microbatches=MICROBATCHES,
        projector="with_encoder" if PARTS[case.family].projectors else None,
        fault_tolerance=1,
    )
    assert made.resilience is not None
    kept = tuple(one for one in made.resilience.templates if one.num_nodes in (case.smallest, case.smallest + 1))
    return replace(made, resilience=replace(made.resilience, templates=kept))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_that_loses_a_node_trains_as_one_process_does(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = steps_of(case.family, num_microbatches=MICROBATCHES)
    wanted = in_one_process(case.family, case.freeze, num_microbatches=MICROBATCHES)
    plan = planned(case)
    strike = Strike(
        point="before-step", action=FaultAction.KILL, rank=case.victim, step=2, marker=str(tmp_path / "struck")
    )
    monkeypatch.setenv(VARIABLE, msgspec.json.encode([strike]).decode())
    model = model_of(case.family, case.freeze)
    samples = [sample for step in steps for sample in step]
    with mm.elastic(
        model,
        collate(steps[0][:2]),
        plan,
        data=mm.MapBatches(samples, len(steps[0]), seed=0, shuffle=False),
        num_steps=len(steps),
        folder=tmp_path / "run",
        optimizer=ADAMW,
        max_restarts=0,
    ) as engine:
        metrics = list(engine.train())
        (recovery,) = engine.recoveries
        engine.pull()
    assert "SIGKILL" in recovery.cause
    assert [step.num_tokens for step in metrics] == list(wanted.num_tokens)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    assert_same_parameters(model.state_dict(), wanted.parameters, TOLERANCE)
