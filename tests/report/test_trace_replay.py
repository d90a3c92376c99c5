"""A trace in words, numbers and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from support.plans.template_jobs import even_job

from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.replay.replay_run import SystemReplay
from mmcompile.planner.resilience.replay.spot_trace import read_trace
from mmcompile.planner.resilience.replay.systems import TraceReplay, replay_trace
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.report.trace_replay import draw_trace, remarks, replay_resilience, trace_text


def value_of(found: TraceReplay, name: str) -> SystemReplay:
    return next(one for one in found.systems if one.name == name)


TRACE = "".join(f"0,add,node{node}\n" for node in range(10)) + "".join(
    f"{600_000 * (index + 1)},remove,node{node}\n" for index, node in enumerate((3, 7, 1, 8))
)


def test_text_json_and_picture(tmp_path: Path) -> None:
    path = tmp_path / "10m.csv"
    path.write_text(TRACE)
    job = replace(even_job(range(2, 9), fault_tolerance=1), layer_bytes={"language_model": (10**9,) * 12})
    found = replay_resilience(resilience_of(job, 10), path)

    text = trace_text(found)
    assert text.startswith("10m.csv: 40 min 00 s, up to 10 nodes, 4 lost, 0 new; fault tolerance 1\n")
    rows = [line.split() for line in text.splitlines() if line.startswith(("templates", "checkpoint", "redundant"))]
    assert len(rows) == 3
    assert rows[0][7:9] == ["0", "4"], "ours loses no sample"
    assert value_of(found, "checkpoint-restart").lost_samples > 0
    assert "a restart takes 1 min 15 s" in text and "1.5 times longer" in text

    value = json.loads(json.dumps(found.to_json()))
    assert [one["name"] for one in value["systems"]] == ["templates", "checkpoint-restart", "redundant computation"]
    assert all(len(one["curve"]) == 120 for one in value["systems"])
    assert value["constants"]["creation_s"] == 45
    useful = [one["useful"] for one in value["systems"]]
    assert useful[0] == max(useful) > 0.9

    picture = draw_trace(tmp_path / "out" / "trace.png", found)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def resilience_of(job: Job, num_nodes: int) -> Resilience:
    return Resilience(
        fault_tolerance=job.fault_tolerance,
        templates=job.templates,
        num_nodes=num_nodes,
        devices_per_node=job.devices_per_node,
        num_microbatches=job.num_microbatches,
        layer_bytes=job.layer_bytes,
        microbatch_samples=4.0,
    )


def test_a_plan_has_all_that_a_replay_needs(tmp_path: Path) -> None:
    path = tmp_path / "10m.csv"
    path.write_text(TRACE)
    job = even_job(range(2, 9), fault_tolerance=1)
    whole = resilience_of(job, 10)
    found = replay_resilience(whole, path)
    assert found == replay_trace(job, read_trace(path), microbatch_samples=4)
    assert remarks(found, whole) == ()


def test_traces_of_other_sizes_are_remarked_on(tmp_path: Path) -> None:
    path = tmp_path / "10m.csv"
    path.write_text(TRACE)
    small = resilience_of(even_job(range(2, 5), fault_tolerance=1), 6)
    (text,) = remarks(replay_resilience(small, path), small)
    assert text.startswith("the plan is for 6 nodes and has no templates of more than 4; plan for 10 nodes")

    large = resilience_of(even_job(range(6, 9), fault_tolerance=1), 14)
    found = replay_resilience(large, path)
    (text,) = remarks(found, large)
    assert text.startswith("templates never start: they need 12 nodes, and the trace has at most 10;")
    assert value_of(found, "templates").useful == 0
