"""Shared tensors, tokens and parameters, stages, replicas, unlike for encoder and language model, train as one process does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import pytest
import torch
from support.oracles.eager import Outcome, difference
from support.oracles.one_process import ADAMW
from support.parity.layouts import PARTS, Freeze
from support.parity.three_steps import MICROBATCHES, assert_same_parameters, in_one_process, model_of, steps_of
from support.processes.time_limit import time_limit

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.errors import ConfigError, PlanError

TOLERANCE = 1e-9
PARAMETER_TOLERANCE = {"gemma3": 1e-6}
"""Where it is not `TOLERANCE`. Gemma3 rounds to float32 in every norm, so a sum in another order may end as the neighbouring
number, and AdamW enlarges that where gradients are small. Measured: 9e-8."""
FLOAT32_TOLERANCE = 1e-5
LIMIT_S = 240.0

Replicas = Literal["plain", "zero1", "fsdp"]
"""What replicas of the language model hold: all, optimizer state once among them, or their part of everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Of one tower."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}{f'cp{self.cp}' if self.cp > 1 else ''}pp{self.pp}dp{self.dp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, what of it trains, and the degrees of its encoder and its language model."""

    family: str
    freeze: Freeze
    encoder: Degrees
    language_model: Degrees
    replicas: Replicas = "plain"

    def __str__(self) -> str:
        return f"{self.family}-encoder_{self.encoder}-llm_{self.language_model}-{self.replicas}-freeze_{self.freeze}"


_FAMILIES = {
    "llava": Freeze.ENCODER,
    "qwen2_5_vl": Freeze.NONE,
    "gemma3": Freeze.NONE,
    "mllama": Freeze.ENCODER,
    "qwen2_audio": Freeze.NONE,
    "llama4": Freeze.ENCODER,
}
"""And what does not train. The last one has experts, which stay whole."""
_ALL_DEGREES = [Degrees(tp=tp, pp=pp, dp=dp) for tp, pp, dp in product((1, 2), repeat=3)]


def _kinds(language_model: Degrees) -> tuple[Replicas, ...]:
    return ("plain", "zero1", "fsdp") if language_model.dp > 1 else ("plain",)


GRID = [
    Case(
        family=family,
        freeze=what,
        encoder=_ALL_DEGREES[(3 * index + shift) % len(_ALL_DEGREES)],
        language_model=degrees,
        replicas=replicas,
    )
    for shift, (family, what) in enumerate(_FAMILIES.items())
    for index, degrees in enumerate(_ALL_DEGREES)
    for replicas in _kinds(degrees)
]
"""Every degree of the language model, with all those of the encoder in turn."""
CORE = [
    Case(
        family="llava", freeze=Freeze.NONE, encoder=Degrees(tp=2), language_model=Degrees(tp=2, dp=2), replicas="zero1"
    ),
]
OTHERS = [
    Case(family="llava", freeze=Freeze.ENCODER, encoder=Degrees(), language_model=Degrees(tp=2)),
    Case(
        family="gemma3", freeze=Freeze.NONE, encoder=Degrees(tp=2), language_model=Degrees(tp=2, dp=2), replicas="zero1"
    ),
    Case(family="llava", freeze=Freeze.NONE, encoder=Degrees(tp=2), language_model=Degrees(pp=2)),
    Case(family="qwen2_5_vl", freeze=Freeze.NONE, encoder=Degrees(tp=2, dp=2), language_model=Degrees(tp=2, pp=2)),
    Case(family="gemma3", freeze=Freeze.NONE, encoder=Degrees(), language_model=Degrees(tp=2, cp=2, pp=2)),
    Case(
        family="qwen2_5_vl",
        freeze=Freeze.NONE,
        encoder=Degrees(tp=2, dp=2),
        language_model=Degrees(tp=2, cp=2, dp=2),
        replicas="fsdp",
    ),
    Case(
        family="llava",
        freeze=Freeze.ENCODER_AND_LANGUAGE_MODEL,
        encoder=Degrees(tp=2),
        language_model=Degrees(tp=2, cp=2, dp=2),
        replicas="fsdp",
    ),
    *GRID,
]
CASES = [*CORE, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS if case not in CORE)]


IN_FLOAT32 = [
    Case(family="llava", freeze=Freeze.NONE, encoder=Degrees(), language_model=Degrees(tp=2)),
    *(
        Case(
            family=family,
            freeze=what,
            encoder=Degrees(tp=2, pp=2) if replicas == "zero1" else Degrees(dp=2),
            language_model=Degrees(tp=2, dp=2),
            replicas=replicas,
        )
        for family, what in _FAMILIES.items()
        for replicas in _kinds(Degrees(dp=2))
    ),
]
LEARNING_RATE = 2.0**14
"""Of plain SGD: what a step changed, divided by it, is a gradient to all its digits, however much larger the parameter was."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_train_as_one_process_does(case: Case) -> None:
    steps, wanted = steps_of(case.family), in_one_process(case.family, case.freeze)
    with time_limit(LIMIT_S), _engine(case, torch.float64, ADAMW, clip_norm=1e6) as engine:
        metrics = [engine.step(step) for step in steps]
        got = engine.state_dict()
    assert [step.num_tokens for step in metrics] == list(wanted.num_tokens)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    norm = sum(float(gradient.square().sum()) for gradient in wanted.first_gradients.values()) ** 0.5
    assert metrics[0].grad_norm == pytest.approx(norm, rel=1e-7)
    assert_same_parameters(got, wanted.parameters, PARAMETER_TOLERANCE.get(case.family, TOLERANCE))


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_FLOAT32, ids=str)
def test_gradients_in_float32_are_those_of_one_process(case: Case) -> None:
    steps = steps_of(case.family, torch.float32)
    wanted = in_one_process(case.family, case.freeze, torch.float32)
    sgd = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
    with time_limit(LIMIT_S), _engine(case, torch.float32, sgd) as engine:
        before = engine.state_dict()
        loss = engine.step(steps[0]).loss
        after = engine.state_dict()
    changes = {name: (tensor - after[name]) / LEARNING_RATE for name, tensor in before.items()}
    # Tied weights have one name here.
    names = dict(model_of(case.family, case.freeze, torch.float32).named_parameters())
    assert not any(changes[name].any() for name in names.keys() - wanted.first_gradients.keys())
    got = Outcome(loss=loss, gradients={name: changes[name] for name in wanted.first_gradients})
    found = difference(got, Outcome(loss=wanted.losses[0], gradients=wanted.first_gradients))
    assert found.within(FLOAT32_TOLERANCE), str(found)


def _engine(
    case: Case, dtype: torch.dtype, optimizer: Callable[..., torch.optim.Optimizer], *, clip_norm: float | None = None
) -> mm.Engine:
    encoders = PARTS[case.family].encoders
    degrees = {"language_model": case.language_model, **dict.fromkeys(encoders, case.encoder)}
    model, batch = model_of(case.family, case.freeze, dtype), collate(steps_of(case.family, dtype)[0][:2])
    plan = mm.plan(
        model,
        batch,
        num_microbatches=MICROBATCHES // case.language_model.dp,
        stages={name: each.pp for name, each in degrees.items()},
        tensor_parallel={name: each.tp for name, each in degrees.items()},
        context_parallel=case.language_model.cp,
        replicas={name: each.dp for name, each in degrees.items()},
        fsdp=["language_model"] if case.replicas == "fsdp" else None,
        projector="with_encoder" if PARTS[case.family].projectors else None,
    )
    assert {chain.name: (chain.tp, chain.cp, len(chain.stages), chain.dp) for chain in plan.chains} == {
        name: (each.tp, each.cp, each.pp, each.dp) for name, each in degrees.items()
    }
    return mm.parallelize(
        model,
        batch,
        plan,
        balance="arrival",
        allow_unused=True,
        optimizer=optimizer,
        clip_norm=clip_norm,
        shard_optimizer=case.replicas == "zero1",
    )


def test_a_plan_decides_who_shares_tensors() -> None:
    model, batch = model_of("llava", Freeze.NONE), collate(steps_of("llava")[0][:2])
    plan = mm.plan(model, batch, tensor_parallel=2)
    with pytest.raises(ConfigError, match="tensor_parallel=2 has no effect together with a plan"):
        mm.parallelize(model, batch, plan, tensor_parallel=2)


def test_unknown_names_and_numbers_are_refused() -> None:
    model, batch = model_of("llava", Freeze.NONE), collate(steps_of("llava")[0][:2])
    with pytest.raises(PlanError, match="no chain 'llm' to give tensor parallel degree 2; chains and components are"):
        mm.plan(model, batch, tensor_parallel={"llm": 2})
    with pytest.raises(ConfigError, match="tensor_parallel of every chain is 0"):
        mm.plan(model, batch, tensor_parallel=0)
