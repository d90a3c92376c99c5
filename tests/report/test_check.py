"""Pre-flight findings on a captured tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from support.processes.cli_run import CONFIGS
from torch import nn

from mmcompile import api
from mmcompile.captured_model import fingerprint_of
from mmcompile.costmodel.cluster import Cluster
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.ir.inputs import completed
from mmcompile.ir.meta_model import skeleton
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Link, Prediction, Segment, Stage, StagePrediction
from mmcompile.planner.pricing.workload import Workload
from mmcompile.report.check import CheckReport, check
from mmcompile.report.explain import explain
from mmcompile.report.layer_work import layer_shares, layer_work
from mmcompile.report.sample_loads import chain_loads
from mmcompile.report.study import Study, study

TEXT_TOKENS = 32


def model_and_batch(train: Sequence[str]) -> tuple[nn.Module, dict[str, object]]:
    model = skeleton(CONFIGS / "llava-tiny.json").train()
    api.freeze(model, list(train))
    return model, dict(example_batch(model, batch_size=2, text_tokens=TEXT_TOKENS))


@pytest.fixture(scope="module")
def whole() -> Study:
    """Everything trains."""
    return study(*model_and_batch(["all"]), None)


@pytest.fixture(scope="module")
def adapted() -> Study:
    """Only the projector trains."""
    return study(*model_and_batch(["projector"]), None)


def with_data(known: Study, shapes: Sequence[SampleShape], name: str = "shapes") -> Study:
    """The same capture met with other samples."""
    stats = DatasetStats.of(shapes, name=name)
    old = known.workload
    return replace(known, workload=Workload.from_geometries(old.geometries, old.captured, old.num_samples, stats))


def plan_of(known: Study, memory_bytes: int = 80 * 10**9, in_flight: int = 2) -> Plan:
    """One stage a component, priced by nothing: what check computes itself does not come from here."""
    cluster = Cluster.parse("1x4xH100")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    components = known.graph.components
    prediction = StagePrediction(
        forward_s=0.01,
        input_grad_s=0.01,
        weight_grad_s=0.01,
        parameter_bytes=10**6,
        gradient_bytes=10**6,
        optimizer_bytes=2 * 10**6,
        activation_bytes=in_flight * 10**6,
        in_flight=in_flight,
    )
    return Plan(
        fingerprint=fingerprint_of(known.graph),
        cluster=cluster,
        chains=tuple(
            Chain(
                name=component.name,
                components=(component.name,),
                stages=(
                    Stage(
                        name=f"{component.name}.0",
                        segments=(Segment(component=component.name, first=0, last=len(component.layers)),),
                        layer_names=tuple(layer.name for layer in component.layers),
                        ranks=(index,),
                        has_backward=True,
                        depth=len(components) - 1 - index,
                        prediction=prediction,
                    ),
                ),
            )
            for index, component in enumerate(components)
        ),
        links=tuple(
            Link(source=f"{source.name}.0", target=f"{target.name}.0", tensors=(), gradient=("x",), num_bytes=1000)
            for source, target in pairwise(components)
        ),
        num_microbatches=4,
        shared_values=(),
        predicted=Prediction(iteration_s=0.1, bubble=0.1, lower_bound_s=0.1, gap=0.0),
        microbatch_samples=2.0,
    )


def sample(name: str, images: int = 1, text_tokens: int = TEXT_TOKENS, patches: int = 4) -> SampleShape:
    return SampleShape(name=name, text_tokens=text_tokens, images=(patches,) * images)


def found(checked: CheckReport, severity: str) -> list[str]:
    return [finding.what for finding in checked.findings if finding.severity == severity]


def test_a_sound_start_has_no_problem(adapted: Study, golden: Callable[[str, str], None]) -> None:
    known = with_data(adapted, [sample(f"s{index}") for index in range(8)])
    checked = check(known, plan_of(known))
    assert checked.ok
    golden("check.txt", str(checked))


def test_parameters_without_gradient_are_named(whole: Study) -> None:
    """LLaVA reads its encoder's second last layer; the last one trains in vain."""
    (warning,) = found(check(whole, plan_of(whole)), "warning")
    assert "trainable parameters get no gradient: model.vision_tower" in warning


def test_the_worst_sample_is_named_where_it_does_not_fit(whole: Study) -> None:
    shapes = [*(sample(f"s{index}") for index in range(50)), sample("10482", images=31, text_tokens=900)]
    known = with_data(whole, shapes)
    roomy, tight = check(known, plan_of(known)), check(known, plan_of(known, memory_bytes=12 * 10**6))
    assert not found(roomy, "problem")
    problems = found(tight, "problem")
    assert any(
        text.startswith(
            "sample 10482 (31 images, 124 patches, 900 text tokens) and 1 more like it in one microbatch: stage "
        )
        and "needs" in text
        for text in problems
    ), problems


def test_more_in_flight_needs_more(whole: Study) -> None:
    known = with_data(whole, [sample("a"), sample("b", text_tokens=400)])
    few, many = (found(check(known, plan_of(known, in_flight=count)), "note")[0] for count in (1, 8))
    assert few != many


def test_a_trainable_tower_without_images(whole: Study, adapted: Study) -> None:
    texts = [SampleShape(name=f"t{index}", text_tokens=20) for index in range(4)]
    trained = check(with_data(whole, texts, "texts"), plan_of(whole))
    assert not trained.ok
    assert any(
        text.startswith("no sample of texts has anything for vision_tower, whose") for text in found(trained, "problem")
    )
    frozen = check(with_data(adapted, texts, "texts"), plan_of(adapted))
    assert any("vision_tower, which never runs" in text for text in found(frozen, "warning"))
    assert any("multi_modal_projector, whose" in text for text in found(frozen, "problem"))


def test_samples_without_images_are_counted(whole: Study) -> None:
    known = with_data(whole, [sample("a"), SampleShape(name="b", text_tokens=20)])
    assert "50% of the samples have nothing for vision_tower" in found(check(known, plan_of(known)), "note")


def test_text_beyond_the_positions(whole: Study) -> None:
    known = with_data(whole, [sample("fine"), sample("long", text_tokens=5000), sample("longer", text_tokens=6000)])
    (problem,) = found(check(replace(known, max_positions=2048), plan_of(known)), "problem")
    assert problem == "sample longer makes 6004 tokens, language_model has positions for 2048; so do 1 more"


def test_nothing_trains() -> None:
    model, batch = model_and_batch(["projector"])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    checked = check(study(model, batch, None), None, "it does not fit")
    assert found(checked, "problem") == ["nothing trains: every parameter is frozen", "no plan: it does not fit"]


def test_a_straggler_is_named(whole: Study) -> None:
    plan = plan_of(whole)
    first, *rest = plan.chains
    (stage,) = first.stages
    slow = replace(stage, prediction=replace(stage.prediction, forward_s=0.2))
    notes = found(check(whole, replace(plan, chains=(replace(first, stages=(slow,)), *rest))), "note")
    assert any(text.startswith(f"the straggler is {stage.name}: ") and "7.3 times" in text for text in notes)
    assert any(text.startswith("no straggler") for text in found(check(whole, plan), "note"))


def test_explained_layers_have_polynomials(whole: Study) -> None:
    """The polynomial of a layer, at the captured load, is its cost."""
    plan = plan_of(whole)
    work = layer_work(whole.graph, whole.table, plan.cluster, whole.dtype)
    name = whole.graph.component("language_model").layers[2].name
    one = explain(plan, name, layer_shares(plan, whole.table, whole.dtype), work)
    (layer,) = one.work
    assert layer.name == name and one.exact
    text = layer.polynomials["forward FLOP"]
    value = eval(text, {"t": layer.tokens, "q": layer.squares})
    assert value == pytest.approx(layer.forward_flops, rel=1e-3)
    assert text in str(one)


def test_shares_of_a_stage_add_up(whole: Study) -> None:
    plan = plan_of(whole)
    for shares in layer_shares(plan, whole.table, whole.dtype).values():
        assert sum(share.forward for share in shares) == pytest.approx(1)
        assert sum(share.activations for share in shares) == pytest.approx(1)


def test_loads_of_equal_samples_are_one(whole: Study) -> None:
    """Samples like the captured ones give the work that the plan is for."""
    known = with_data(whole, [sample("a"), sample("b")])
    for loads in chain_loads(plan_of(known), known, 5).values():
        assert loads == pytest.approx([1.0] * 5, rel=1e-2)


def test_loads_follow_the_samples(whole: Study) -> None:
    known = with_data(whole, [sample("short"), sample("long", text_tokens=1000)])
    plan = replace(
        plan_of(known), cluster=Cluster.local(4)
    )  # a device on which the launch of kernels is not everything
    loads = chain_loads(plan, known, 20)["language_model"]
    assert min(loads) < 1.5 and max(loads) > 5


def test_a_batch_is_completed_as_for_planning() -> None:
    model, batch = model_and_batch(["all"])
    assert set(completed(model, batch)) >= set(batch)
