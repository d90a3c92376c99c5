"""Layers measured on this machine: every kind, its parts, other sizes."""

from __future__ import annotations

import pytest
import torch
from zoo import ALL, Size

from mmcompile.api import freeze
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.load import Load
from mmcompile.errors import ConfigError
from mmcompile.ir.capture import capture
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.layer_kinds import layer_kinds
from mmcompile.passes.pipeline import Pipeline
from mmcompile.profile import profile
from mmcompile.runtime.monitoring.timer import one_thread
from mmcompile.runtime.runtime_probe import probe_runtime

LLAVA = ALL["llava"]


@pytest.fixture(scope="module")
def projector_only() -> tuple[Calibration, dict[str, tuple[str, ...]], list[tuple[str, float]]]:
    """A LLaVA whose projector trains, measured at two sizes; its kinds; the progress told."""
    model = LLAVA.build()
    freeze(model, "multi_modal_projector")
    told: list[tuple[str, float]] = []
    sizes = (LLAVA.first, LLAVA.second)
    made = profile(
        model,
        [LLAVA.draw(size, seed=0) for size in sizes],
        device_name="cpu",
        rounds=1,
        on_progress=lambda text, share: told.append((text, share)),
    )
    graph = capture(model, LLAVA.batch()).graph
    Pipeline(passes=(GradientFlow(),)).run(graph)
    return made, dict(layer_kinds(graph)), told


def test_every_kind_is_measured_at_every_size(
    projector_only: tuple[Calibration, dict[str, tuple[str, ...]], list[tuple[str, float]]],
) -> None:
    made, kinds, told = projector_only
    assert {costs.kind for costs in made.kinds} == {kind for own in kinds.values() for kind in own}
    assert {len(costs.measurements) for costs in made.kinds} == {2}
    assert (made.device, made.dtype, made.torch) == ("cpu", "float32", torch.__version__.split("+")[0])
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1
    assert told[0][0] == "capturing batch 1 of 2"


def test_backward_is_measured_where_there_is_one(
    projector_only: tuple[Calibration, dict[str, tuple[str, ...]], list[tuple[str, float]]],
) -> None:
    made, kinds, _ = projector_only
    load = Load(tokens=100.0, squares=5000.0)
    tower, projector, block = (
        made.times(kinds[name][layer], load)
        for name, layer in (("vision_tower", 1), ("multi_modal_projector", 0), ("language_model", 1))
    )
    assert tower is not None and projector is not None and block is not None
    assert tower.forward_s > 0 and tower.backward_s == 0
    assert projector.weight_grad_s > 0 and projector.input_grad_s == 0
    assert block.input_grad_s > 0 and block.weight_grad_s == 0


def test_larger_batches_take_longer() -> None:
    family = ALL["qwen2_audio"]
    sizes = (Size(samples=1, length=60), Size(samples=8, length=240))
    made = profile(family.build(), [family.draw(size, seed=0) for size in sizes], device_name="cpu", rounds=2)
    (block,) = (costs for costs in made.kinds if costs.kind.startswith("language_model.layers"))
    small, large = (point.times.total_s for point in block.measurements)
    assert large > 3 * small


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to measure: pass at least one batch"):
        profile(LLAVA.build(), [], device_name="cpu")


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_the_runtime_is_measured_between_two_processes() -> None:
    costs = probe_runtime(num_steps=3)
    for seconds in (costs.forward_s, costs.backward_s, costs.message_s, costs.link.latency_s):
        assert 1e-6 < seconds < 0.1
    assert 1e7 < costs.link.bytes_per_s < 1e12
    assert costs.optimizer == "AdamW" and 1e-11 < costs.optimizer_s_per_byte < 1e-7
    assert str(costs).startswith("runtime     forward ")
