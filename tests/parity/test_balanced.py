"""Whatever a balancer does with a step's samples, processes train exactly as one process does.

Steps with media on no sample, on one, and on some; one sample heavier than all others together; numbers of samples that nothing
divides, or fewer than there are microbatches; encoders with more and with fewer replicas than the language model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import pytest
import torch
from support.oracles.eager import Outcome, difference
from support.oracles.one_process import ADAMW
from support.parity.balanced_steps import (
    LEARNING_RATE,
    MIXED,
    SGD,
    STEPS,
    TWO_ENCODERS,
    UNEVEN,
    Recorded,
    Scrambled,
    Shape,
    Trained,
    draw,
    in_an_engine,
    in_one_process,
)
from support.parity.layouts import PARTS, Freeze, freeze
from support.parity.three_steps import assert_same_parameters
from support.processes.time_limit import time_limit
from torch import nn
from zoo import ALL, Batch

import mmcompile as mm
from mmcompile.batching.balance.assignment import Assignment
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.hierarchical import Defer, Hierarchical
from mmcompile.batching.balance.registry import BALANCERS
from mmcompile.config import EncoderPlacement
from mmcompile.data.collate import collate
from mmcompile.runtime.engine import Engine

LIMIT_S = 240.0
LOSS_TOLERANCE = 1e-9
FLOAT32_LOSS_TOLERANCE = 1e-7
"""Of families that compute norms in float32 whatever they are given: other padding rounds them otherwise, in one process too."""
GRADIENT_TOLERANCE = 1e-5
"""Of each parameter's largest gradient."""
PARAMETER_TOLERANCE = 1e-6
"""After AdamW, which turns the rounding of a small gradient into a larger step."""

ALL_DEFERRED = "hierarchical-all"
TOGETHER = "hierarchical-together"
_OTHERS: Mapping[str, Balancer] = {Scrambled.name: Scrambled(), TOGETHER: Hierarchical(defer=Defer.NONE)}
_DEFERRING = (ALL_DEFERRED, Scrambled.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, how many replicas of what, and who decides where samples go."""

    family: str = "two_encoder_net"
    """Its images are of any number in one capture, so that it is captured least often."""
    encoders: tuple[int, ...]
    """Replicas of each encoder, and of its projector. One number for a model of two: there are no sounds then."""
    language_model: int
    balance: str
    stages: int = 1
    """Of the language model."""
    microbatches: int = 2
    freeze: Freeze = Freeze.NONE
    projector_alone: bool = False
    placement: EncoderPlacement = "disjoint"
    num_steps: int | None = None
    """All that there are if None."""

    def __str__(self) -> str:
        words = [self.family, "encoder" + "+".join(map(str, self.encoders)), f"llm{self.language_model}x{self.stages}"]
        words += [self.balance, f"mb{self.microbatches}"]
        words += [f"freeze_{self.freeze}"] * (self.freeze is not Freeze.NONE)
        words += [] if self.num_steps is None else [f"{self.num_steps}steps"]
        words += ["projector_alone"] * self.projector_alone + [self.placement] * (self.placement != "disjoint")
        return "-".join(words)


_LAYOUTS = ((2, 1), (1, 2), (3, 2), (2, 3))
"""Replicas of the encoder and of the language model."""
CORE = [
    Case(encoders=(2,), language_model=2, balance="post-balance", placement="colocated"),
]
SLOW = [
    Case(encoders=(2, 1), language_model=2, balance="auto"),
    Case(encoders=(3,), language_model=2, balance=Scrambled.name, microbatches=3),
    Case(family="llava", encoders=(2,), language_model=1, balance=ALL_DEFERRED, num_steps=2),
    Case(encoders=(2,), language_model=1, balance="arrival", stages=2),
    Case(encoders=(1,), language_model=2, balance="post-balance"),
    Case(encoders=(2,), language_model=3, balance=ALL_DEFERRED, freeze=Freeze.ENCODER),
    *(
        Case(encoders=(encoder,), language_model=language_model, balance=balance)
        for encoder, language_model in _LAYOUTS
        for balance in (ALL_DEFERRED, TOGETHER, "post-balance", "arrival", "joint", "auto")
    ),
    *(
        Case(family="llava", encoders=(encoder,), language_model=language_model, balance=balance)
        for encoder, language_model in _LAYOUTS
        for balance in (ALL_DEFERRED, "post-balance")
    ),
    Case(family="llava", encoders=(3,), language_model=2, balance=Scrambled.name, microbatches=5, projector_alone=True),
    Case(family="llava", encoders=(2,), language_model=2, balance=Scrambled.name, stages=3, microbatches=4),
    Case(encoders=(2,), language_model=2, balance=ALL_DEFERRED, freeze=Freeze.ENCODER_AND_LANGUAGE_MODEL),
    Case(encoders=(2, 3), language_model=2, balance=Scrambled.name, microbatches=3),
    Case(encoders=(1, 2), language_model=2, balance="node-local", microbatches=1),
    Case(family="gemma3", encoders=(2,), language_model=1, balance=ALL_DEFERRED, stages=2),
    Case(family="qwen2_audio", encoders=(3,), language_model=2, balance=Scrambled.name, microbatches=3, num_steps=3),
]
CASES = [*CORE, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW if case not in CORE)]


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    with time_limit(LIMIT_S):
        yield


@functools.cache
def _steps(family: str, num_encoders: int, count: int | None) -> tuple[list[Batch], ...]:
    shapes = STEPS if num_encoders == 1 else TWO_ENCODERS
    return tuple(draw(family, step, seed) for seed, step in enumerate(shapes[:count], 1))


def _steps_of(case: Case) -> tuple[list[Batch], ...]:
    return _steps(case.family, len(case.encoders), case.num_steps)


def _model(family: str, what: Freeze) -> nn.Module:
    model = ALL[family].build(torch.float64)
    freeze(model, PARTS[family], what)
    return model


@functools.cache
def _in_one_process(family: str, num_encoders: int, count: int | None, what: Freeze) -> Trained:
    return in_one_process(_model(family, what), _steps(family, num_encoders, count), SGD)


def _wanted(case: Case) -> Trained:
    return _in_one_process(case.family, len(case.encoders), case.num_steps, case.freeze)


def _engine(
    case: Case,
    balance: str | Balancer,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    *,
    correct: bool = False,
) -> Engine:
    parts, model = PARTS[case.family], _model(case.family, case.freeze)
    chains = dict(zip(parts.encoders, case.encoders, strict=False))
    if case.projector_alone:
        chains |= dict(zip(parts.projectors, case.encoders, strict=False))
    if case.placement == "colocated":  # one chain of all components
        chains = {}
    batch = collate(_steps_of(case)[0][:2])  # with every modality in it
    plan = mm.plan(
        model,
        batch,
        num_microbatches=case.microbatches,
        stages={"language_model": case.stages, **dict.fromkeys(chains, 1)},
        replicas={"language_model": case.language_model, **chains},
        projector="alone" if case.projector_alone else None,
        placement=case.placement,
    )
    return mm.parallelize(
        model,
        batch,
        plan,
        optimizer=optimizer,
        balance=balance,
        allow_unused=True,
        check_rows=True,
        correct=correct,
    )


def _assert_same(got: Trained, wanted: Trained, loss_tolerance: float) -> None:
    assert got.num_tokens == wanted.num_tokens
    for number, (ours, theirs) in enumerate(zip(got.outcomes, wanted.outcomes, strict=True), 1):
        assert ours.loss == pytest.approx(theirs.loss, rel=loss_tolerance, abs=0), f"loss of step {number}"
        unlike = difference(_only(ours, theirs.gradients.keys()), theirs)
        assert unlike.within(GRADIENT_TOLERANCE), f"step {number}: {unlike}"
        moved = [name for name, change in ours.gradients.items() if name not in theirs.gradients and change.any()]
        assert not moved, f"step {number} changed {moved}, which have no gradient"


def _only(outcome: Outcome, names: AbstractSet[str]) -> Outcome:
    return replace(outcome, gradients={name: outcome.gradients[name] for name in names})


def _assert_every_replica_worked(seen: Sequence[Assignment]) -> None:
    for row, name in enumerate(seen[0].components):
        used = {int(replica) for assignment in seen for replica in assignment.replica[row] if replica >= 0}
        assert used == set(range(seen[0].grid.num_replicas[row])), f"replicas {used} of {name} worked"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_balanced_steps_train_as_one_process_does(case: Case) -> None:
    kept = None
    if case.balance != Auto.name:
        kept = Recorded(inner=_OTHERS.get(case.balance) or BALANCERS[case.balance])
    with _engine(case, kept or case.balance) as engine:
        got = in_an_engine(engine, _steps_of(case), LEARNING_RATE)
    _assert_same(got, _wanted(case), FLOAT32_LOSS_TOLERANCE if case.family == "gemma3" else LOSS_TOLERANCE)
    if kept is not None:
        assert len(kept.seen) == len(_steps_of(case))
        _assert_every_replica_worked(kept.seen)
        deferred = any(a.deferred(row).any() for a in kept.seen for row in range(len(a.components) - 1))
        assert deferred == (case.balance in _DEFERRING)


@pytest.mark.slow
def test_replicas_keep_equal_optimizer_states() -> None:
    """AdamW, step after step, on parameters that two ranks hold; costs are corrected by what steps took."""
    case = Case(encoders=(2,), language_model=2, balance=ALL_DEFERRED)
    steps = [draw(case.family, shapes, seed) for seed, shapes in enumerate((*STEPS[:3], MIXED), 50)]
    wanted = in_one_process(_model(case.family, case.freeze), steps, ADAMW)
    with _engine(case, case.balance, ADAMW, correct=True) as engine:
        got = in_an_engine(engine, steps, learning_rate=None)
        assert "; correction on: saves" in engine.step(steps[0]).balance
    losses, expected = ([outcome.loss for outcome in run.outcomes] for run in (got, wanted))
    assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE, abs=0)
    assert_same_parameters(got.parameters, wanted.parameters, PARAMETER_TOLERANCE)


@pytest.mark.slow
def test_steps_say_who_balanced_them() -> None:
    case = Case(encoders=(1,), language_model=2, balance="auto")
    even = [Shape(text=20, images=1)] * 4
    with _engine(case, case.balance) as engine:
        assert "less than arrival order" in engine.step(draw(case.family, UNEVEN, 1)).balance
        assert engine.step(draw(case.family, even, 1)).balance.startswith("arrival: imbalance 0.0% is below 5%")
