"""What a user sees of a healthy engine, and of arguments that do not fit."""

from __future__ import annotations

import functools
import math
import socket
from collections.abc import Callable

import pytest
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples

from mmcompile.errors import BatchError, ConfigError, EngineError
from mmcompile.planner.schedule.schedule import ActionKind
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.optim.optimizer import OptimizerSpec, RankOptimizer

ONE_RANK = hand_plan(2, lm0=0, lm1=0, lm2=0)


def test_metrics_trace_and_errors_that_leave_the_engine_usable() -> None:
    schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
    plan = hand_plan(2, lm0=0, lm1=1, lm2=0)
    with Engine(plan, HandSource(HandModel()), scheduler=schedule, clip_norm=100.0) as engine:
        samples = hand_samples(4)
        with pytest.raises(BatchError, match="every label of the step is -100"):
            engine.step([{**sample, "labels": torch.full((1, 3), -100)} for sample in samples])
        with pytest.raises(BatchError, match="of sample 3 has shape .* sample 2 has"):
            engine.step([*samples[:3], {"input_ids": torch.ones(1, 1, 1, dtype=torch.int64)}])
        metrics = engine.step(samples, trace=True)
        assert (metrics.step, metrics.num_samples, metrics.num_tokens) == (1, 4, 11)
        assert metrics.grad_norm is not None and 0 < metrics.grad_norm < math.inf
        assert all(0 < busy < metrics.seconds for busy in metrics.busy_s)
        assert engine.learning_rate == pytest.approx(1e-4 / 2)
        events = engine.trace()
        forwards = [(e.rank, e.stage, e.microbatch) for e in events if e.kind is ActionKind.F]
        assert sorted(forwards) == [
            (rank, f"language_model.{i}", m) for rank, i in ((0, 0), (0, 2), (1, 1)) for m in (0, 1)
        ]
        assert max(e.end_s for e in events) - min(e.start_s for e in events) < metrics.seconds
        for microbatch in (0, 1):
            times = {e.stage: e for e in events if e.kind is ActionKind.F and e.microbatch == microbatch}
            assert times["language_model.0"].end_s <= times["language_model.1"].start_s
            assert times["language_model.1"].end_s <= times["language_model.2"].start_s
        engine.learning_rate = 0.0
        before = engine.state_dict()
        engine.step(samples)
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.step(samples)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    model = HandModel()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = hand_plan(2, vision=0, lm0=0, lm1=0, lm2=0)
    decay = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    with Engine(plan, HandSource(model), model=model, optimizer=decay) as engine:
        engine.step(hand_samples(4, images=(0,)))
        seen = engine.state_dict()
        engine.step(hand_samples(4))
        after = engine.state_dict()
    for name, tensor in after.items():
        assert torch.equal(tensor, seen[name]) == name.startswith(("vision.", "audio.", "scale"))
        assert torch.equal(seen[name], before[name]) == name.startswith(("audio.", "scale"))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (functools.partial(torch.optim.SGD, []), r"positional arguments \(\[\],\); pass them by keyword"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "wanted a torch.optim class"),
        (torch.optim.LBFGS, "LBFGS cannot run in other processes"),
        (functools.partial(torch.optim.SGD, lr=torch.tensor(0.1)), "must be plain numbers, flags and text"),
    ],
)
def test_optimizers_that_cannot_travel_are_refused(
    optimizer: Callable[..., torch.optim.Optimizer], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(ONE_RANK, HandSource(HandModel()), optimizer=optimizer)


def test_schedulers_that_need_a_value_are_refused() -> None:
    with pytest.raises(ConfigError, match="set engine.learning_rate yourself"):
        Engine(ONE_RANK, HandSource(HandModel()), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)  # type: ignore[arg-type]


def test_a_launcher_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="the plan has stages on 3 ranks, the launcher started 1: start 3 processes"):
        Engine(hand_plan(2, lm0=0, lm1=1, lm2=2), HandSource(HandModel()))


def test_optimizer_state_of_a_late_parameter_travels() -> None:
    spec = OptimizerSpec.of(functools.partial(torch.optim.AdamW, lr=0.1))
    optimizers = [RankOptimizer(spec), RankOptimizer(spec)]
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in optimizers]
    optimizers[0].step()
    for optimizer, parameter in zip(optimizers, parameters, strict=True):
        optimizer.add("late", parameter)
    parameters[0].grad = torch.ones(3)
    optimizers[0].step()
    state = optimizers[0].state(["late"])
    assert state.keys() == {"step/late", "exp_avg/late", "exp_avg_sq/late"}
    optimizers[1].load_state(state)
    parameters[1].data.copy_(parameters[0].data)
    for optimizer, parameter in zip(optimizers, parameters, strict=True):
        parameter.grad = torch.full((3,), 2.0)
        optimizer.step()
    assert torch.equal(parameters[0], parameters[1])
