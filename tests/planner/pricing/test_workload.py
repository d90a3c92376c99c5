"""`Workload`: shapes of samples into loads, held against captures of other batches and against enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import zoo
from support.oracles.sample_shapes import shapes_of_samples

from mmcompile.costmodel.load import Load
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import PlanError
from mmcompile.ir.capture import capture
from mmcompile.passes.cost.cost import Cost
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.pricing.sample_sizes import SampleRows
from mmcompile.planner.pricing.workload import Workload

GEOMETRIES = {
    "vision": Geometry(component="vision", modality="image", rows_per_unit=1.25, pairs_per_unit=1.5),
    "hearing": Geometry(component="hearing", modality="audio", rows_per_unit=1.0, pairs_per_unit=1.0),
    "language_model": Geometry(
        component="language_model",
        modality="text",
        rows_per_unit=1.0,
        pairs_per_unit=1.0,
        tokens_per_patch=0.25,
        tokens_per_frame=0.5,
        pads=True,
    ),
    "head": Geometry(component="head", modality="sample", rows_per_unit=3.0, pairs_per_unit=9.0),
}
CAPTURED = {name: Load(tokens=40.0, squares=800.0) for name in GEOMETRIES}
SAMPLES = (
    SampleShape(name="text", text_tokens=30),
    SampleShape(name="picture", text_tokens=10, images=(64, 16)),
    SampleShape(name="sound", text_tokens=5, audios=(100,)),
    SampleShape(name="both", text_tokens=8, images=(40,), audios=(20,)),
)


def workload(*samples: SampleShape, packed: bool = False) -> Workload:
    geometries = dict(GEOMETRIES)
    if packed:
        text = GEOMETRIES["language_model"]
        geometries["language_model"] = Geometry(
            component=text.component,
            modality="text",
            rows_per_unit=1.0,
            pairs_per_unit=1.0,
            tokens_per_patch=0.25,
            tokens_per_frame=0.5,
        )
    stats = DatasetStats.of(samples, name="toy") if samples else None
    return Workload.from_geometries(geometries, CAPTURED, 4, stats)


def test_loads_of_samples() -> None:
    loads = workload(*SAMPLES).loads(SAMPLES)
    assert loads["vision"] == Load(tokens=1.25 * 120, squares=1.5 * (64**2 + 16**2 + 40**2))
    assert loads["hearing"] == Load(tokens=120, squares=100**2 + 20**2)
    assert loads["language_model"] == Load(tokens=4 * 55, squares=4 * 55**2)  # the sound's 5 + 50, for all four
    assert loads["head"] == Load(tokens=12, squares=36)


def test_packed_sequences_bring_their_own_lengths() -> None:
    lengths = (30, 10 + 20, 5 + 50, 8 + 10 + 10)
    load = workload(*SAMPLES, packed=True).loads(SAMPLES)["language_model"]
    assert load == Load(tokens=sum(lengths), squares=sum(length**2 for length in lengths))


def test_rows_attend_within_windows() -> None:
    windows = Geometry(component="v", modality="image", rows_per_unit=1.0, pairs_per_unit=0.1, window=8.0)
    toy = Workload.from_geometries({"v": windows}, CAPTURED, 1)
    samples = [SampleShape(name="a", text_tokens=0, images=(80, 16, 4))]
    assert toy.loads(samples)["v"] == Load(tokens=100, squares=8 * 80 + 8 * 16 + 4 * 4)


def test_a_component_without_its_modality_has_no_load() -> None:
    assert workload(*SAMPLES).loads(SAMPLES[:1])["vision"] == Load(tokens=0, squares=0)
    assert workload(*SAMPLES).absent() == () and workload(*SAMPLES[:2]).absent() == ("hearing",)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_is_that_of_all_microbatches(size: int, packed: bool) -> None:
    toy = workload(*SAMPLES, packed=packed)
    every = [toy.loads(chosen) for chosen in product(SAMPLES, repeat=size)]
    for name, load in toy.mean(size).items():
        assert load.tokens == pytest.approx(np.mean([loads[name].tokens for loads in every]))
        assert load.squares == pytest.approx(np.mean([loads[name].squares for loads in every]))


def load_of(drawn: dict[str, SampleRows], microbatch: int) -> dict[str, Load]:
    return {
        name: Load(tokens=float(own.rows[microbatch]), squares=float(own.squares[microbatch]))
        for name, own in drawn.items()
    }


def test_draws_are_microbatches_of_samples() -> None:
    toy = workload(*SAMPLES)
    every = {tuple(toy.loads(chosen).items()) for chosen in product(SAMPLES, repeat=2)}
    drawn = toy.draw(200, 2, seed=1)
    assert {tuple(load_of(drawn, index).items()) for index in range(200)} == every


def test_draws_average_to_the_mean_and_repeat_with_their_seed() -> None:
    toy = workload(*SAMPLES)
    drawn, again, other = toy.draw(20_000, 3, seed=2), toy.draw(20_000, 3, seed=2), toy.draw(20_000, 3, seed=3)
    for name, load in toy.mean(3).items():
        assert drawn[name].rows.mean() == pytest.approx(load.tokens, rel=0.02)
        assert drawn[name].squares.mean() == pytest.approx(load.squares, rel=0.02)
        assert np.array_equal(drawn[name].rows, again[name].rows)
    assert not np.array_equal(drawn["vision"].rows, other["vision"].rows)


def test_sizes_that_are_not_whole_differ_by_one() -> None:
    drawn = workload(*SAMPLES).draw(8, 2.5)
    samples = drawn["head"].rows / 3.0
    assert samples.sum() == 20 and set(samples.tolist()) == {2, 3}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_is_heavier_than_the_worst(size: int) -> None:
    toy = workload(*SAMPLES)
    worst = toy.worst(size)
    every = [toy.loads(chosen) for chosen in product(SAMPLES, repeat=size) if len(set(chosen)) == size]
    for name, load in worst.loads.items():
        assert load.tokens == max(loads[name].tokens for loads in every)
    assert worst.samples["vision"] == ("picture", "both")[:size]
    assert worst.samples["language_model"][0] == "sound"


def test_a_dataset_smaller_than_a_microbatch_is_repeated() -> None:
    worst = workload(*SAMPLES[1:3]).worst(3)
    assert worst.loads["vision"].tokens == 2 * 1.25 * 80 and worst.samples["vision"] == ("picture",)
    assert worst.loads["language_model"].tokens == 3 * 55


def test_the_worst_sample_counts_where_the_dataset_was_sampled() -> None:
    many = [SampleShape(name=str(n), text_tokens=10 + n % 5, images=(50,)) for n in range(3000)]
    many[1234] = SampleShape(name="giant", text_tokens=10, images=(9000,))
    stats = DatasetStats.of(many, name="many", max_samples=50)
    worst = Workload.from_geometries(GEOMETRIES, CAPTURED, 4, stats).worst(2)
    assert worst.samples["vision"][0] == "giant" and worst.loads["vision"].tokens == 1.25 * 9050


def test_without_a_dataset_every_microbatch_is_like_the_captured_one() -> None:
    toy = workload()
    half = {name: Load(tokens=20.0, squares=400.0) for name in GEOMETRIES}
    assert toy.mean(2) == toy.worst(2).loads == half
    assert toy.worst(2).samples["vision"] == () and toy.absent() == ()
    drawn = toy.draw(3, 2)
    assert [load_of(drawn, index) for index in range(3)] == [half] * 3


def test_what_makes_no_microbatch_is_refused() -> None:
    with pytest.raises(PlanError, match="dataset none has no samples"):
        Workload.from_geometries(GEOMETRIES, CAPTURED, 4, DatasetStats.of([], name="none"))
    with pytest.raises(PlanError, match=r"a microbatch of 0.5 samples; each has at least 1"):
        workload(*SAMPLES).mean(0.5)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen2_audio", "two_encoder_net"])
def test_a_capture_of_another_batch_has_the_loads_foretold(family: str) -> None:
    """Twice the samples, other lengths: what the first capture says is what the second one has."""
    chosen = zoo.ALL[family]
    model = chosen.build()
    first, second = chosen.batch(), chosen.second_batch()
    graph, other = capture(model, first).graph, capture(model, second).graph
    table = Cost().run(graph)
    foretold = Workload.of(graph, table, first)
    assert foretold.mean(graph.num_samples) == table.loads
    assert foretold.loads(shapes_in(second, foretold)) == Cost().run(other).loads


def shapes_in(batch: zoo.Batch, known: Workload) -> list[SampleShape]:
    """Samples of a batch of the zoo, in which all have the same shape."""
    count, length = batch["input_ids"].shape
    audios = batch.get("input_features", batch.get("sounds"))
    frames = (
        [] if audios is None else [audios.shape[-1] // 2 if "input_features" in batch else 8] * (len(audios) // count)
    )
    whole = next(
        shapes_of_samples(
            [{key: value for key, value in batch.items() if key in ("input_ids", "pixel_values", "image_grid_thw")}],
            patch=14,
        )
    )
    patches = whole.images if "images" not in batch else (16,) * len(batch["images"])
    each = len(patches) // count
    text = known.geometries["language_model"]
    taken = text.tokens_per_patch * sum(patches[:each]) + text.tokens_per_frame * sum(frames)
    return [
        SampleShape(
            name=str(index),
            text_tokens=round(length - taken),
            images=patches[index * each : (index + 1) * each],
            audios=tuple(frames),
        )
        for index in range(count)
    ]
