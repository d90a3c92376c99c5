"""The engine with gradients in float64 and in fixed point: as one process trains, and bit by bit whatever the replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs.hand_stages import LANGUAGE, HandModel, HandSource, hand_samples
from support.oracles import one_process
from torch import Tensor

from mmcompile.config import Reduction
from mmcompile.data.collate import Sample
from mmcompile.errors import ConfigError, EngineError
from mmcompile.planner.plan.placement import PlacedStage, Placement
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.engine import Engine

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
CLIP = 0.3
DROPOUT = "x = functional.dropout(x, 0.3)"
NAMES = ("vision.0", *LANGUAGE)
SLOTS = 6


def replicas(*ranks: Sequence[int]) -> Placement:
    """Whole replicas of one tower; per replica, the ranks of vision.0 and language_model.0 to 2. Six microbatches in all."""
    return Placement(
        stages=tuple(
            PlacedStage(name=f"{name}#{replica}", program=name, ranks=(rank,), depth=3 - index, replica=replica)
            for index, name in enumerate(NAMES)
            for replica, of_replica in enumerate(ranks)
            for rank in [of_replica[index]]
        ),
        num_microbatches=SLOTS // len(ranks),
        num_replicas=(len(ranks),),
    )


LAYOUTS = {
    "one replica on three ranks": replicas((0, 0, 1, 2)),
    "two replicas that cross": replicas((0, 0, 1, 2), (2, 2, 1, 0)),
    "three replicas, one on one rank": replicas((0, 1, 1, 0), (2, 2, 2, 2), (0, 0, 1, 1)),
}


def steps(dtype: torch.dtype) -> list[list[Sample]]:
    """One sample a microbatch. Of the second step's four, the last of two or three replicas get fewer than others, or none."""
    drawn = [
        hand_samples(SLOTS, images=(0, 1, 4), seed=1),
        hand_samples(4, images=(3,), seed=2),
        hand_samples(SLOTS, images=(0, 5), seed=3),
    ]
    return [[{name: _as(value, dtype) for name, value in sample.items()} for sample in step] for step in drawn]


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def model_of(dtype: torch.dtype) -> HandModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = HandModel(tied=True, dtype=dtype)
    model.vision.body.requires_grad_(False)
    return model


@dataclass(frozen=True, kw_only=True)
class Run:
    losses: list[float]
    norms: list[float | None]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def train(placement: Placement, reduction: Reduction, dtype: torch.dtype, folder: Path, fault: str = "pass") -> Run:
    torch.manual_seed(7)
    model = model_of(dtype)
    with Engine(
        placement, HandSource(model, fault), model=model, optimizer=ADAMW, clip_norm=CLIP, reduction=reduction
    ) as engine:
        metrics = [engine.step(samples) for samples in steps(dtype)]
        engine.save(folder)
    saved = checkpoint.read(folder)
    return Run(
        losses=[step.loss for step in metrics],
        norms=[step.grad_norm for step in metrics],
        weights=dict(saved.weights),
        optimizer=dict(saved.optimizer),
    )


def differing(left: Run, right: Run) -> list[str]:
    """What has other bits in two runs."""
    found = ["losses"] * (left.losses != right.losses) + ["norms"] * (left.norms != right.norms)
    for mine, other in ((left.weights, right.weights), (left.optimizer, right.optimizer)):
        assert mine.keys() == other.keys()
        found += [name for name, tensor in mine.items() if not torch.equal(tensor, other[name])]
    return found


@pytest.mark.slow
def test_fixed_gives_the_same_bits_in_every_layout(tmp_path: Path) -> None:
    """Parameters, AdamW's state, losses and norms after three steps, in float32, with dropout and clipping."""
    runs = {
        name: train(placement, "fixed", torch.float32, tmp_path / str(index), DROPOUT)
        for index, (name, placement) in enumerate(LAYOUTS.items())
    }
    one, two, three = runs.values()
    assert differing(one, two) == []
    assert differing(one, three) == []
    assert any(path.startswith("exp_avg_sq/") for path in one.optimizer)
    assert all(norm is not None and norm > CLIP for norm in one.norms), "gradients were clipped"
    # Without dropout losses are others, so it was on; and added up by torch, bits do depend on the layout.
    fast = [train(LAYOUTS[name], "fast", torch.float32, tmp_path / name, DROPOUT) for name in list(LAYOUTS)[:2]]
    assert differing(*fast)
    assert fast[0].losses == pytest.approx(one.losses, rel=1e-4)


@pytest.mark.parametrize("reduction", ["fp64", "fixed"])
def test_replicas_train_as_one_process_does(reduction: Reduction, tmp_path: Path) -> None:
    run = train(LAYOUTS["two replicas that cross"], reduction, torch.float64, tmp_path)
    model = copy.deepcopy(model_of(torch.float64))
    wanted = one_process.train(model, steps(torch.float64), optimizer=ADAMW, clip_norm=CLIP, loss=one_process.RETURNED)
    assert run.losses == pytest.approx(list(wanted.losses), rel=1e-12)
    assert run.norms == pytest.approx(list(wanted.norms), rel=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(run.weights[name], parameter.detach(), rtol=0, atol=1e-12)


def test_a_gradient_that_cannot_be_added_is_an_error_that_names_it() -> None:
    model = model_of(torch.float32)
    # The model says again what it read, so far from it that half of the gradients are out of range.
    fault = "x = x * (-1e30 if x.shape[1] == 4 else 1)"
    with (
        Engine(replicas((0, 0, 1, 1), (1, 1, 0, 0)), HandSource(model, fault), reduction="fixed") as engine,
        pytest.raises(
            EngineError,
            match=r"(?s)step 1 has gradients .*'fixed' cannot add: those of blocks\.0\.down\.bias, .* more of 8,388,608 or more",
        ),
    ):
        engine.step(steps(torch.float32)[0])


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reduction is 'exact'; wanted one of fast, fp64, fixed"):
        Engine(replicas((0, 0, 0, 0)), HandSource(model_of(torch.float32)), reduction="exact")  # type: ignore[arg-type]
