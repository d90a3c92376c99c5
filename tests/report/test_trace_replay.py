"""A trace in words, numbers and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from template_jobs import even_job

from mmcompile.plan.templates.replay import SystemReplay
from mmcompile.plan.templates.systems import TraceReplay
from mmcompile.report.trace_replay import draw_trace, simulate_trace, trace_text


def value_of(found: TraceReplay, name: str) -> SystemReplay:
    return next(one for one in found.systems if one.name == name)


TRACE = "".join(f"0,add,node{node}\n" for node in range(10)) + "".join(
    f"{600_000 * (index + 1)},remove,node{node}\n" for index, node in enumerate((3, 7, 1, 8))
)


def test_text_json_and_picture(tmp_path: Path) -> None:
    path = tmp_path / "10m.csv"
    path.write_text(TRACE)
    job = replace(even_job(range(2, 9), fault_tolerance=1), layer_bytes={"language_model": (10**9,) * 12})
    found = simulate_trace(job, path, microbatch_samples=4)

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
