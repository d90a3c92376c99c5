"""Prices of layers: exact prices and those of many loads agree; shardings, calibrations and empty microbatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.oracles.layer_prices import layer_prices
from support.plans.problem import problem_of
from support.plans.sized_plan import vision_language_72b
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.calibration import Calibration, KindCosts, Measurement
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerTimes, layer_times, seconds
from mmcompile.costmodel.load import NO_LOAD, Load
from mmcompile.ir.graph import ComponentKind
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.pricing.pricing import WHOLE, LayerSharding, Pricing
from mmcompile.planner.search.settings import Degrees, SearchSpace, Setting

CLUSTER = Cluster.parse("2x8xH100")
GRAPH, TABLE = vision_language_72b()
PRICING = Pricing(table=TABLE, cluster=CLUSTER, dtype="bfloat16", merging=frozenset({"language_model"}))
LOADS = [Load(tokens=1000.0 * size, squares=2e6 * size * size) for size in (0.3, 1, 2, 7.5, 30)]


def columns(loads: list[Load]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([load.tokens for load in loads]), np.array([load.squares for load in loads])


def test_a_layer_costs_what_the_table_says_at_the_load() -> None:
    for load in LOADS:
        wanted = TABLE.at({"language_model": load})["language_model"]
        got = layer_prices(PRICING, "language_model", load)
        assert tuple(own for own, _ in got) == wanted
        assert got[5][1] == layer_times(wanted[5], CLUSTER.device, "bfloat16")
    assert tuple(own for own, _ in layer_prices(PRICING, "vision")) == TABLE["vision"]


@pytest.mark.parametrize("component", ["vision", "projector", "language_model"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 4])
def test_many_loads_at_once_give_the_same_seconds_and_bytes(component: str, recompute: str, tp: int) -> None:
    sharding = LayerSharding(tp=tp, recompute=recompute)  # type: ignore[arg-type]
    seconds, sizes = PRICING.bulk(component, *columns(LOADS), sharding)
    group = PRICING.groups(component)
    for index, load in enumerate(LOADS):
        for layer, (own, times) in enumerate(layer_prices(PRICING, component, load, sharding)):
            # Collectives follow a line between powers of four, so shared layers agree less exactly.
            exact = pytest.approx(
                (times.forward_s, times.input_grad_s, times.weight_grad_s), rel=1e-6 if tp == 1 else 0.1
            )
            assert tuple(seconds[group[layer], index]) == exact
            got = (sizes.parameter, sizes.trainable, sizes.activation, sizes.working, sizes.output)
            wanted = (
                own.parameter_bytes,
                own.trainable_bytes,
                own.activation_bytes,
                own.working_bytes,
                own.output_bytes,
            )
            assert [int(column[group[layer], index]) for column in got] == [
                pytest.approx(size, rel=1e-6) for size in wanted
            ]
            assert bool(sizes.backward[group[layer], index]) == own.has_backward


def test_ranks_that_share_tokens_compute_encoders_whole() -> None:
    """In one line with the language model, which alone shares its tokens; tensors are shared all the same."""
    pricing = replace(PRICING, token_sharing=frozenset({"language_model"}))
    for component, cp in (("vision", 1), ("projector", 1), ("language_model", 4)):
        for tp in (1, 2):
            wanted = layer_prices(PRICING, component, LOADS[1], LayerSharding(tp=tp, cp=cp))
            assert layer_prices(pricing, component, LOADS[1], LayerSharding(tp=tp, cp=4)) == wanted
            bulk = [
                priced.bulk(component, *columns(LOADS), LayerSharding(tp=tp, cp=n))[0]
                for priced, n in ((pricing, 4), (PRICING, cp))
            ]
            assert np.array_equal(bulk[0], bulk[1])


def test_problems_know_whose_tokens_are_shared() -> None:
    """A line on two ranks: the encoder's products at full length, half of the language model's."""
    graph = toy_graph(
        {"vision": (ComponentKind.ENCODER, 2), "language_model": (ComponentKind.LANGUAGE_MODEL, 2)},
        [("vision", "language_model")],
    )
    costs = {"vision": (frozen(300),) * 2, "language_model": (cost(200),) * 2}
    space = SearchSpace(cp=(2,), placements=("colocated",), microbatches=(2,))
    problem = problem_of(graph, costs, CLUSTER, dtype="bfloat16", fingerprint=FINGERPRINT, space=space, global_batch=2)
    (chain,) = problem.sets[0].chains
    priced = problem.prices.priced(chain, Degrees(cp=2), Setting(num_microbatches=2, samples=1))
    device = CLUSTER.device

    def seconds_of(gflops: float) -> float:
        return seconds(round(gflops * 1e9), 0, 10, device, "bfloat16")

    forward_s = np.diff(priced.forward_s)
    # The first layer of the language model merges the encoder's rows: it stays whole, too.
    wanted = [seconds_of(300), seconds_of(300), seconds_of(200), seconds_of(100)]
    assert forward_s.tolist() == pytest.approx(wanted, rel=1e-6)


def test_durations_are_those_of_the_layers_and_nothing_without_tokens() -> None:
    loads = [LOADS[1], NO_LOAD, LOADS[2]]
    got = PRICING.group_durations("vision", *columns(loads))[PRICING.groups("vision")]
    assert got.shape == (27, 3, 3)
    assert not got[:, 1].any()
    times = layer_prices(PRICING, "vision", LOADS[2])[3][1]
    assert got[3, 2].sum() == pytest.approx(times.total_s, rel=1e-6)


def test_tensor_and_token_ranks_share_the_work_and_the_merging_layer_stays_whole() -> None:
    load = LOADS[2]
    whole = layer_prices(PRICING, "language_model", load)
    tokens = layer_prices(PRICING, "language_model", load, LayerSharding(cp=4))
    tensors = layer_prices(PRICING, "language_model", load, LayerSharding(tp=8))
    assert tokens[0] == whole[0]
    assert tokens[1][0].forward_flops == whole[1][0].forward_flops // 4
    assert tokens[1][0].parameter_bytes == whole[1][0].parameter_bytes
    assert tensors[1][0].parameter_bytes == whole[1][0].parameter_bytes // 8
    spread = layer_prices(PRICING, "language_model", load, LayerSharding(fsdp=16))
    assert spread[1][0].parameter_bytes == whole[1][0].parameter_bytes // 16
    assert spread[1][0].forward_flops == whole[1][0].forward_flops


def test_costs_that_are_already_one_ranks_are_not_shared_again() -> None:
    given = replace(PRICING, given_cp=4)
    assert layer_prices(given, "language_model", LOADS[2], LayerSharding(cp=4)) == layer_prices(
        PRICING, "language_model", LOADS[2]
    )


def test_costs_without_growth_hold_for_every_load() -> None:
    costs = {"vision": (frozen(10), frozen(10), cost(5))}
    pricing = Pricing(table=CostTable(layers=costs), cluster=CLUSTER, dtype="bfloat16")
    assert layer_prices(pricing, "vision", LOADS[0]) == layer_prices(pricing, "vision", LOADS[4])
    assert list(pricing.groups("vision")) == [0, 0, 1]
    seconds, _ = pricing.bulk("vision", *columns(LOADS))
    assert (seconds[0] == seconds[0, 0]).all()


def calibrated(seconds_per_token: float, *, tp: int = 1) -> Pricing:
    """All blocks of the language model measured: so many seconds a token for each of three parts."""
    points = tuple(
        Measurement(
            load=load,
            times=LayerTimes(
                forward_s=seconds_per_token * load.tokens,
                input_grad_s=seconds_per_token * load.tokens,
                weight_grad_s=seconds_per_token * load.tokens,
            ),
        )
        for load in LOADS
    )
    calibration = Calibration(
        device="H100",
        processor="",
        dtype="bfloat16",
        torch="2.13.0",
        mmcompile="0",
        kinds=(KindCosts.fitted("block", "layers.0", points, tp=tp),),
    )
    kinds = {
        name: tuple(
            "block" if name == "language_model" and 0 < index < 81 else f"{name}.{index}" for index in range(len(own))
        )
        for name, own in TABLE.layers.items()
    }
    return Pricing(table=TABLE, cluster=CLUSTER, dtype="bfloat16", kinds=kinds, calibration=calibration)


def test_measured_kinds_replace_the_roofline_and_carry_over_to_other_layouts() -> None:
    pricing, load = calibrated(1e-6), LOADS[2]
    measured = layer_prices(pricing, "language_model", load)[1][1]
    assert measured.forward_s == pytest.approx(1e-6 * load.tokens)
    assert layer_prices(pricing, "language_model", load)[0] == layer_prices(PRICING, "language_model", load)[0]
    # With four ranks a layer gains what the roofline says it gains.
    analytic = [
        layer_prices(PRICING, "language_model", load, sharding)[1][1] for sharding in (WHOLE, LayerSharding(tp=4))
    ]
    shared = layer_prices(pricing, "language_model", load, LayerSharding(tp=4))[1][1]
    assert shared.forward_s / measured.forward_s == pytest.approx(analytic[1].forward_s / analytic[0].forward_s)


def test_measured_kinds_count_in_durations_of_many_microbatches() -> None:
    pricing = calibrated(1e-6)
    got = pricing.group_durations("language_model", *columns(LOADS))[pricing.groups("language_model")]
    for index, load in enumerate(LOADS):
        assert got[1, index, 0] == pytest.approx(1e-6 * load.tokens, rel=1e-6)
    seconds, _ = pricing.bulk("language_model", *columns(LOADS))
    assert seconds[pricing.groups("language_model")[1], :, 0] == pytest.approx(got[1, :, 0])


def test_a_measurement_of_the_layout_itself_wins() -> None:
    pricing, load = calibrated(1e-6, tp=4), LOADS[2]
    assert layer_prices(pricing, "language_model", load, LayerSharding(tp=4))[1][1].forward_s == pytest.approx(
        1e-6 * load.tokens
    )
    assert layer_prices(pricing, "language_model", load)[1] == layer_prices(PRICING, "language_model", load)[1]
