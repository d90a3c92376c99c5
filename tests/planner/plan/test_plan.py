"""The plan as a value: JSON and files, refusals, the table."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans.search_plan import search
from support.plans.template_jobs import even_template
from support.plans.toy_plan import FINGERPRINT, vision_language

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import OutputError, PlanError, StalePlanError
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.planner.plan.plan_record import Link, SharedValue
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.planner.resilience.template import Template, TemplateStage


@pytest.fixture(scope="module")
def plan() -> Plan:
    graph, costs = vision_language()
    found = search(
        graph,
        costs,
        Cluster.parse("1x4xH100"),
        num_microbatches=8,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        stages={"vision": 1, "language_model": 2},
        projector="with_encoder",
    )
    features = TensorSpec(name="image_features", shape=("s0*16", 64), dtype="bfloat16")
    return replace(
        found,
        links=(
            Link(
                source="vision.0",
                target="language_model.0",
                tensors=(features,),
                gradient=("image_features",),
                num_bytes=2_500_000,
            ),
        ),
        shared_values=(
            SharedValue(
                name="causal_mask",
                stages=("language_model.0", "language_model.1"),
                choice="recompute",
                recompute_s=2e-6,
                send_s=1.2e-5,
            ),
        ),
    )


def test_json_and_files_round_trip(plan: Plan, tmp_path: Path) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    # Plain JSON, made to be read.
    assert json.loads(path.read_text())["chains"][0]["stages"][0]["name"] == "vision.0"


def whole_template(num_nodes: int) -> Template:
    """Both chains, the encoder beside the first layers of the language model."""
    text = even_template(num_nodes, 8)
    tower = TemplateStage(chain="vision", first=0, last=7, devices=(0,), seconds=1.0)
    return replace(text, stages=(tower, *text.stages))


def with_templates(plan: Plan) -> Plan:
    return replace(
        plan,
        resilience=Resilience(
            fault_tolerance=1,
            templates=tuple(whole_template(size) for size in (1, 2)),
            num_nodes=4,
            devices_per_node=1,
            num_microbatches=8,
            layer_bytes={"vision": (0,) * 6 + (30,), "language_model": (100,) * 8},
        ),
    )


def test_templates_round_trip(plan: Plan) -> None:
    assert Plan.from_json(with_templates(plan).to_json()) == with_templates(plan) != plan
    older = json.loads(plan.to_json())
    assert older.pop("resilience") is None
    assert Plan.from_json(json.dumps(older)) == plan, "written before plans had templates"


def test_templates_that_do_not_fit_are_refused_with_their_place(plan: Plan) -> None:
    whole = with_templates(plan)
    stage = ("resilience", "templates", 1, "stages", 0)
    cases = [
        (edited(whole, *stage, "speed", value=1), "has an unknown field $.resilience.templates[1].stages[0].speed"),
        (edited(whole, "resilience", "colour", value=1), "has an unknown field $.resilience.colour; remove it"),
        (edited(whole, *stage, "first", value="0"), "at `$.resilience.templates[1].stages[0].first`"),
        (edited(whole, "resilience", "layer_bytes", value=[1]), "at `$.resilience.layer_bytes`"),
        (edited(whole, *stage, "last", value=6), "the template for 2 nodes"),
        (edited(whole, "resilience", "templates", value=[]), "is no plan: templates are for [] nodes"),
        (edited(whole, "resilience", "num_nodes", value=1), "is no plan: a fault tolerance of 1 needs 2 replicas"),
        (
            edited(whole, "resilience", "layer_bytes", value={"language_model": [1] * 8}),
            "its templates are for chains of {'language_model': 8} layers, and the plan has {'vision': 7, 'language_model': 8}",
        ),
        (edited(whole, "resilience", value={}), "missing required field `fault_tolerance` - at `$.resilience`"),
    ]
    for content, message in cases:
        with pytest.raises(PlanError) as caught:
            Plan.from_json(content)
        assert message in str(caught.value)


def edited(plan: Plan, *path: str | int, value: object) -> str:
    """The plan's JSON with one field replaced or added."""
    raw = json.loads(plan.to_json())
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(raw)


def test_what_is_no_plan_is_refused_with_file_place_and_remedy(plan: Plan, tmp_path: Path) -> None:
    text = plan.to_json()
    cases = [
        (text[: len(text) // 2], "is no plan: Input data was truncated"),
        ("", "is no plan: Input data was truncated"),
        (text.replace("{", "{,", 1), "JSON is malformed: object keys must be strings (byte 1)"),
        ("[1]", "has plan version None, this mmcompile reads 4; make it anew with `mmcompile plan`"),
        (edited(plan, "version", value=7), "has plan version 7, this mmcompile reads 4"),
        (edited(plan, "colour", value="red"), "has an unknown field $.colour; remove it"),
        (edited(plan, "chains", 0, "stages", 0, "speed", value=1), "has an unknown field $.chains[0].stages[0].speed"),
        (edited(plan, "num_microbatches", value="8"), "Expected `int`, got `str` - at `$.num_microbatches`"),
        (edited(plan, "schedule", value="dualpipe"), "Invalid enum value 'dualpipe' - at `$.schedule`"),
        (edited(plan, "chains", 0, "stages", value=None), "at `$.chains[0].stages`"),
        (edited(plan, "chains", value=[]), "is no plan: it has no stages"),
        (
            edited(plan, "chains", 0, "stages", 0, "recompute", value=["full"]),
            "is no plan: stage vision.0 says for 1 layers what they compute again, and has 7; make it anew",
        ),
        (
            edited(plan, "chains", 0, "stages", 0, "recompute", value=["some"]),
            "Invalid enum value 'some' - at `$.chains[0].stages[0].recompute[0]`",
        ),
        ("[" * 100_000, "is no plan"),
    ]
    path = tmp_path / "plan.json"
    for content, message in cases:
        path.write_text(content)
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value)
        assert message in str(caught.value)
    path.write_bytes(b'{"version": 2, "model": "\xff\xfe"}')
    with pytest.raises(PlanError, match="is no plan"):
        Plan.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read plan .*absent.json: No such file or directory"):
        Plan.load(tmp_path / "absent.json")


def test_a_full_disk_leaves_the_old_plan_whole(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("the old plan")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match="cannot write .*plan.json"):
            plan.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "the old plan"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "Other"}, "its model is Toy, the model at hand has Other"),
        ({"parameters": "beef"}, "its parameters is 00ff, the model at hand has beef"),
        ({"torch": "9.9"}, "its torch is 2.13.0, the model at hand has 9.9"),
        ({"transformers": "9.9"}, "its transformers is 5.24.0, the model at hand has 9.9"),
    ],
)
def test_a_stale_plan_is_refused_with_the_field_that_differs(plan: Plan, change: dict[str, str], message: str) -> None:
    check_fingerprint(plan, FINGERPRINT)
    with pytest.raises(StalePlanError, match=message):
        check_fingerprint(plan, replace(FINGERPRINT, **change))
