"""Stages run one after another are the model: same loss, same gradients; and what their ports say is what flows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import pytest
from support.graphs.split import (
    SplitRun,
    captured,
    eager_from_logits,
    even_plan,
    root_values,
    run_split,
    with_present_flags,
)
from support.oracles.eager import Outcome, difference
from torch import nn
from zoo import ALL

import mmcompile as mm
from mmcompile.codegen.program import PatternPrograms, Port, StageProgram
from mmcompile.codegen.stage_programs import lower
from mmcompile.ir.graph import torch_dtype
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Link

TOLERANCE = 1e-9
MODELS = {
    "llava": {"language_model": 3, "vision_tower": 2},
    "qwen3_vl": {"language_model": 3, "visual": 2},
    "mllama": {"language_model": 3},
    "two_encoder_net": {"language_model": 3, "vision": 2},
}
EVERY = list(MODELS)


def _train_all(name: str) -> bool:
    return True


def _freeze_encoders(name: str) -> bool:
    encoder = any(part in name for part in ("vision_tower", "visual", "vision_model", "vision.", "hearing."))
    return not encoder or "merger" in name


def _train_joints(name: str) -> bool:
    return "projector" in name or "merger" in name


def _train_head(name: str) -> bool:
    return "head" in name


FREEZING: dict[str, Callable[[str], bool]] = {
    "nothing frozen": _train_all,
    "encoders frozen": _freeze_encoders,
    "only projectors train": _train_joints,
    "only the head trains": _train_head,
}


@functools.cache
def _run(name: str, trains: Callable[[str], bool]) -> tuple[SplitRun, Outcome, int]:
    """A model split and run, and the eager outcome with its number of tokens."""
    model, batch, found = captured(name)
    programs = _programs(model, name, trains)
    run = run_split(model, programs, root_values(found, batch))
    return run, *eager_from_logits(model, batch)


def _programs(model: nn.Module, name: str, trains: Callable[[str], bool]) -> PatternPrograms:
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(parameter_name))
    found = with_present_flags(model, captured(name)[2])
    return lower(found, even_plan(found.graph, MODELS[name]))


@pytest.mark.parametrize("trains", FREEZING.values(), ids=FREEZING.keys())
@pytest.mark.parametrize("name", EVERY)
def test_loss_and_all_gradients_equal_eager(name: str, trains: Callable[[str], bool]) -> None:
    run, wanted, num_tokens = _run(name, trains)
    assert run.num_tokens == num_tokens
    assert wanted.gradients, "nothing trains"
    found = difference(run.outcome, wanted)
    assert found.within(TOLERANCE), str(found)


@pytest.mark.parametrize("trains", FREEZING.values(), ids=FREEZING.keys())
@pytest.mark.parametrize("name", EVERY)
def test_ports_say_what_flows(name: str, trains: Callable[[str], bool]) -> None:
    run, _, _ = _run(name, trains)
    assert run.crossings
    for crossing in run.crossings:
        for port in (crossing.output, crossing.input):
            assert (port.shape, port.dtype) == (crossing.shape, crossing.dtype)
            assert port.gradient == crossing.required_grad == crossing.got_gradient, port
        assert crossing.output.kind == crossing.input.kind == "link"


@pytest.mark.parametrize(
    ("trains", "flagged"),
    [
        (
            _train_all,
            {"vision_tower.0", "vision_tower.1", "multi_modal_projector.0", "language_model.0", "language_model.1"},
        ),
        (_freeze_encoders, {"multi_modal_projector.0", "language_model.0", "language_model.1"}),
        (_train_joints, {"multi_modal_projector.0", "language_model.0", "language_model.1"}),
        (_train_head, set()),
    ],
)
def test_gradient_comes_back_only_to_stages_at_or_behind_what_trains(
    trains: Callable[[str], bool], flagged: set[str]
) -> None:
    run, _, _ = _run("llava", trains)
    assert {peer for c in run.crossings if c.input.gradient for peer in c.input.peers} == flagged


def test_a_value_read_by_two_stages_is_one_output_with_both_as_peers() -> None:
    """Mllama's vision features enter cross-attention layers in two stages; their gradients add up."""
    run, _, _ = _run("mllama", _train_all)
    outputs = {crossing.output for crossing in run.crossings}
    assert [port.peers for port in outputs if len(port.peers) > 1] == [("language_model.1", "language_model.2")]


def test_deep_vision_features_enter_a_later_stage_of_the_language_model() -> None:
    """Qwen3-VL adds features of the encoder's blocks after its first language layers."""
    run, _, _ = _run("qwen3_vl", _train_all)
    into = {c.input.peers[0] for c in run.crossings if c.output.peers[0].startswith("language_model")}
    assert {"visual.0", "visual.1"} & into
    assert len([c for c in run.crossings if c.input.peers == ("visual.1",)]) > 1


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_that_is_read_is_in_one_stage_or_tied(name: str) -> None:
    model, _, _ = captured(name)
    programs = _programs(model, name, _train_all).programs.values()
    read = [spec.name for program in programs for spec in program.parameters]
    assert sorted(set(read)) == sorted(read)
    assert set(read) == set(_run(name, _train_all)[1].gradients)


@pytest.mark.parametrize("name", EVERY)
def test_links_of_a_plan_are_the_ports_of_its_programs(name: str) -> None:
    model, _, found = captured(name)
    found = with_present_flags(model.requires_grad_(True), found)
    plan = even_plan(found.graph, MODELS[name])
    assert plan.links == _links_of_ports(lower(found, plan).programs.values())


def test_links_of_a_found_plan_are_the_ports_of_its_programs() -> None:
    model, batch = ALL["two_encoder_net"].build(), ALL["two_encoder_net"].batch()
    plan = mm.plan(model, batch, stages={"language_model": 3})
    programs = mm.stage_programs(model, batch, Plan.from_json(plan.to_json()))
    assert len(plan.links) >= 4
    assert sorted(plan.links, key=str) == sorted(_links_of_ports(programs.values()), key=str)


def _links_of_ports(programs: Iterable[StageProgram]) -> tuple[Link, ...]:
    found = []
    for program in programs:
        for target in dict.fromkeys(peer for port in program.outputs for peer in port.peers):
            ports = [port for port in program.outputs if target in port.peers]
            found.append(
                Link(
                    source=program.stage,
                    target=target,
                    tensors=tuple(TensorSpec(name=p.name, shape=p.shape, dtype=p.dtype) for p in ports),
                    gradient=tuple(port.name for port in ports if port.gradient),
                    num_bytes=sum(_num_bytes(port) for port in ports),
                )
            )
    return tuple(found)


def _num_bytes(port: Port) -> int:
    sizes = [size for size in port.shape if isinstance(size, int)]
    assert len(sizes) == len(port.shape)
    return math.prod(sizes) * torch_dtype(port.dtype).itemsize
