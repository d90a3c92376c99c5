"""`SampleRate`s: at the mean load they are what the plan predicts, measured where there are measurements."""

from __future__ import annotations

import pytest
from support.plans.problem import problem_of
from support.plans.sized_plan import mixed_samples, vision_language_72b, workload
from support.plans.toy_plan import FINGERPRINT

from mmcompile.config import Recompute
from mmcompile.costmodel.calibration import Calibration, KindCosts, Measurement
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.costmodel.load import Load
from mmcompile.planner.plan.plan_record import SampleRate
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.outcome import sample_rates
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, SearchSpace, Setting

CLUSTER = Cluster.parse("8x8xH100")


def problem(calibration: Calibration | None = None) -> Problem:
    graph, table = vision_language_72b(train="projector")
    return problem_of(
        graph,
        table,
        CLUSTER,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        global_batch=64,
        space=SearchSpace.everything(CLUSTER),
        workload=workload(table, mixed_samples(300)),
        calibration=calibration,
        kinds={name: (name,) * len(layers) for name, layers in table.layers.items()},
    )


def candidate(own: Problem, placement: str, encoder: Degrees, language: Degrees, recompute: Recompute) -> Candidate:
    """Two stages of each chain that has more than a layer."""
    chains = next(chains for chains in own.sets if chains.placement == placement and not chains.colocated)
    middles = [len(chain.layers) // 2 for chain in chains.chains]
    return assemble(
        own,
        chains,
        Setting(num_microbatches=4, samples=64 / language.dp / 4, dp=language.dp, recompute=recompute),
        [*[encoder] * (len(chains.chains) - 1), language],
        [
            ((0, middle), (middle, len(chain.layers))) if middle else ((0, 1),)
            for middle, chain in zip(middles, chains.chains, strict=True)
        ],
    )


def rates_of(found: Candidate) -> tuple[SampleRate, ...]:
    assert found.problem.workload is not None
    return sample_rates(found, found.problem.workload.geometries)


def measured(component: str, seconds_per_token: float) -> Calibration:
    """Every layer of a component takes so many seconds a token, in each of three parts."""
    loads = [Load(tokens=tokens, squares=tokens**2) for tokens in (500.0, 1000.0, 4000.0, 9000.0)]
    points = [
        Measurement(load=load, times=LayerTimes(**dict.fromkeys(_PARTS, seconds_per_token * load.tokens)))
        for load in loads
    ]
    kinds = (KindCosts.fitted(component, "layers.0", points),)
    return Calibration(
        device=CLUSTER.device.name, processor="", dtype="bfloat16", torch="2.13.0", mmcompile="0", kinds=kinds
    )


_PARTS = ("forward_s", "input_grad_s", "weight_grad_s")


@pytest.mark.parametrize("calibration", [None, measured("vision", 1e-6)], ids=["analytic", "measured"])
@pytest.mark.parametrize(
    ("placement", "encoder", "language", "recompute"),
    [
        ("with_encoder", Degrees(), Degrees(), "none"),
        ("alone", Degrees(dp=3), Degrees(tp=4, dp=2), "selective"),
        ("with_language_model", Degrees(tp=2, dp=4), Degrees(tp=2, cp=2, dp=4), "full"),
    ],
)
def test_rates_at_the_mean_load_are_the_predictions(
    placement: str, encoder: Degrees, language: Degrees, recompute: Recompute, calibration: Calibration | None
) -> None:
    found = candidate(problem(calibration), placement, encoder, language, recompute)
    rates = rates_of(found)
    for index, (chain, degrees) in enumerate(zip(found.chains.chains, found.degrees, strict=True)):
        own = [rate for rate in rates if rate.chain == chain.name]
        assert [rate.geometry.component for rate in own] == list(chain.components)
        last = index == len(found.degrees) - 1
        seconds = saved = 0.0
        for rate in own:
            load = found.problem.prices.mean_load(rate.geometry.component, found.setting, degrees, last=last)
            assert load is not None
            seconds += rate.seconds.at(load)
            saved += rate.activation_bytes.at(load)
        stages = [stage for stage in found.stages if stage.chain == index]
        assert seconds == pytest.approx(sum(stage.total_s for stage in stages), rel=1e-9)
        assert saved == pytest.approx(sum(stage.saved_bytes for stage in stages), rel=1e-6)


def test_measured_layers_cost_what_was_measured() -> None:
    rate = rates_of(candidate(problem(measured("vision", 1e-6)), "with_encoder", Degrees(), Degrees(), "none"))[0]
    # Its 27 layers are frozen, and measured with their gradients all the same.
    assert rate.geometry.component == "vision"
    assert rate.seconds.per_token == pytest.approx(3 * 27 * 1e-6, rel=1e-3)
    assert rate.seconds.per_square == pytest.approx(0.0, abs=1e-15)
