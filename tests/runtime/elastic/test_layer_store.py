"""Layers out of one worker and into another: the optimizer goes on as if nothing had happened, bit by bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.models.layer_models import (
    FROZEN_ONLY,
    NOTHING,
    NUM_LAYERS,
    OPTIMIZERS,
    UNUSED,
    bits,
    empty_store,
    initial,
    layer,
    layers,
    specs,
    train,
    trained_store,
)
from torch import Tensor, nn

from mmcompile.errors import CheckpointError, VerifyError
from mmcompile.ir.graph import ParameterSpec
from mmcompile.runtime.elastic.layer_store import LayerStore, digest_of
from mmcompile.runtime.optim.optimizer import OptimizerSpec, RankOptimizer

ALL = range(NUM_LAYERS)
EVERY = frozenset(layers(*ALL)) - {layer(NOTHING)}


def uninterrupted(optimizer: str, num_steps: int) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and optimizer state (`<key>/<name>`) of a plain torch optimizer after so many steps."""
    parameters = {
        name: nn.Parameter(value.clone())
        for name, value in initial().items()
        if "frozen" not in name and value.is_floating_point()
    }
    plain = OPTIMIZERS[optimizer](list(parameters.values()))
    train(parameters, plain.step, 0, num_steps)
    state = {
        f"{key}/{name}": value
        for name, parameter in parameters.items()
        for key, value in plain.state.get(parameter, {}).items()
        if value is not None
    }
    return parameters, state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_goes_on_bit_by_bit(optimizer: str, before: int) -> None:
    """Layers taken over after some steps, one by one in another order, then dropped where they came from."""
    source, target = trained_store(optimizer, before), empty_store(optimizer)
    target.hold(layers(5))
    train(target.state.parameters, target.state.optimizer.step, 50, 2)  # stale: of another past
    for index in (5, 3, 1, 0):
        target.put(layer(index), source.bundle(layer(index)))
    target.hold(layers(FROZEN_ONLY))
    assert target.held == source.held == EVERY
    assert {one: target.digest(one) for one in EVERY} == {one: source.digest(one) for one in EVERY}
    source.clear()

    train(target.state.parameters, target.state.optimizer.step, before, 5)
    parameters, state = uninterrupted(optimizer, before + 5)
    assert bits(target.state.trainable) == bits(parameters)
    assert bits(target.state.optimizer.state(parameters)) == bits(state)
    for name, parameter in parameters.items():
        assert target.state.parameters[name].stride() == parameter.stride(), name


def test_put_overwrites_in_place_and_copies() -> None:
    source, target = trained_store(), trained_store(num_steps=5)
    before = dict(target.state.parameters)
    target.put(layer(3), source.bundle(layer(3)))
    assert all(target.state.parameters[name] is parameter for name, parameter in before.items())
    taken = bits(target.bundle(layer(3)))
    train(source.state.parameters, source.state.optimizer.step, 9, 1)
    assert bits(target.bundle(layer(3))) == taken != bits(source.bundle(layer(3)))


def test_state_goes_where_the_source_has_none() -> None:
    source, target = trained_store(num_steps=0), trained_store(num_steps=2)
    target.put(layer(0), source.bundle(layer(0)))
    assert set(target.bundle(layer(0))) == {"value/0.tied", "value/0.norm"}


def test_bundles_are_not_copies_and_name_what_trains() -> None:
    store = trained_store()
    bundle = store.bundle(layer(1))
    own = ["half", "unused"]
    state = [f"state/{key}/1.half" for key in ("step", "exp_avg", "exp_avg_sq")]
    assert set(bundle) == {f"value/1.{name}" for name in own} | set(state), (
        f"{UNUSED} was never updated, frozen never sent"
    )
    assert bundle["value/1.half"].data_ptr() == store.state.parameters["1.half"].data_ptr()
    assert store.bundle(layer(FROZEN_ONLY)) == store.bundle(layer(NOTHING)) == {}


def test_frozen_parameters_are_shared() -> None:
    values = initial()
    store = LayerStore(specs(values), values, OptimizerSpec.of(OPTIMIZERS["adamw"]))
    store.put(layer(1), trained_store().bundle(layer(1)))
    store.hold(layers(FROZEN_ONLY, 3))
    for name in ("1.frozen", "2.frozen", "3.bytes"):
        assert store.state.parameters[name].data_ptr() == values[name].data_ptr()
        assert not store.state.parameters[name].requires_grad
    for name in ("1.half", "3.across", "3.scalar"):
        assert store.state.parameters[name].data_ptr() != values[name].data_ptr()


def test_hold_leaves_what_is_here() -> None:
    store = trained_store()
    before = bits(store.state.parameters)
    store.hold(layers(*ALL))
    assert bits(store.state.parameters) == before


@pytest.mark.parametrize("kept", [(), (0,), (5,), (1, 3), (2, 4), tuple(ALL)])
def test_keep(kept: tuple[int, ...]) -> None:
    """The tied parameter stays as long as one of its layers does, and what stays trains on as if alone."""
    store, same = trained_store(), trained_store()
    before = {index: bits(same.bundle(layer(index))) for index in kept}
    store.keep(layers(*kept))
    own = {spec.name for index in kept for spec in specs(initial()).get(layer(index), ())}
    assert set(store.state.parameters) == own
    assert {index: bits(store.bundle(layer(index))) for index in kept} == before
    assert store.held >= {layer(index) for index in kept} - {layer(NOTHING)}
    trained = {name: p for name, p in store.state.trainable.items() if name not in (UNUSED, "5.none")}
    assert {id(p) for p in store.state.optimizer.optimizer.state} == {id(p) for p in trained.values()}

    for one in (store, same):
        train(one.state.parameters, one.state.optimizer.step, 3, 5)
    assert bits(store.state.parameters).items() <= bits(same.state.parameters).items()


def test_what_is_dropped_comes_back() -> None:
    store, source = trained_store(), trained_store()
    for kept, back in (((0, 1, 2), (3, 5)), ((3, 5), (0, 1, 2)), ((), tuple(ALL))):
        store.keep(layers(*kept))
        for index in set(back) - {NOTHING, FROZEN_ONLY}:
            store.put(layer(index), source.bundle(layer(index)))
        store.hold(layers(*back))
    assert store.held == EVERY
    assert {one: store.digest(one) for one in EVERY} == {one: source.digest(one) for one in EVERY}
    assert len(store.state.optimizer.optimizer.param_groups[0]["params"]) == 1 + len(store.state.trainable)


def test_clear_and_gradients() -> None:
    store = trained_store()
    for parameter in store.state.trainable.values():
        parameter.grad = torch.ones_like(parameter)
    store.state.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in store.state.trainable.values())
    store.clear()
    assert not store.state.parameters and not store.held
    assert not store.state.optimizer.optimizer.state


def test_trains() -> None:
    store = empty_store()
    assert [index for index in range(NUM_LAYERS + 1) if store.trains(layer(index))] == [0, 1, 3, 5]
    assert not store.held


def test_parameters_learned_later() -> None:
    values = {**initial(), "1.late": torch.ones(2), "3.later": torch.ones(2)}
    late = {
        layer(1): [ParameterSpec(name="1.late", shape=(2,), dtype="float32", trainable=True)],
        layer(3): [ParameterSpec(name="3.later", shape=(2,), dtype="float32", trainable=False)],
    }
    store = LayerStore(specs(initial()), values, OptimizerSpec.of(OPTIMIZERS["adamw"]))
    store.hold(layers(1))
    train(store.state.parameters, store.state.optimizer.step, 0, 2)
    before = bits(store.bundle(layer(1)))
    store.learn(late)
    assert store.held == {layer(1)}
    assert bits(store.bundle(layer(1))) == before | bits({"value/1.late": values["1.late"]})
    store.hold(layers(3))
    assert store.held >= {layer(3)} and "3.later" in store.state.parameters


class TestDigest:
    def test_independent_of_order_and_layout(self) -> None:
        one = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
        other = {"b": one["b"].clone(), "a": one["a"].t().contiguous().t()}
        assert not other["a"].is_contiguous()
        assert digest_of(one) == digest_of(other)

    @pytest.mark.parametrize(
        "other",
        [
            {"a": torch.tensor([0.0, 1.0])},
            {"a": torch.tensor([-0.0, 1.0, 2.0])},
            {"b": torch.tensor([0.0, 1.0, 2.0])},
            {"a": torch.tensor([[0.0, 1.0, 2.0]])},
            {"a": torch.tensor([0.0, 1.0, 2.0]).view(torch.int32)},
            {"a": torch.tensor([0.0, 1.0, 2.0]), "b": torch.ones(0)},
            {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0])},
        ],
    )
    def test_of_what_differs(self, other: dict[str, Tensor]) -> None:
        assert digest_of(other) != digest_of({"a": torch.tensor([0.0, 1.0, 2.0])})

    def test_tells_optimizer_state(self) -> None:
        one, other = trained_store(), trained_store()
        other.state.optimizer.optimizer.state[other.state.parameters["0.norm"]]["exp_avg"][1] += 1e-6
        same = {index: one.digest(layer(index)) == other.digest(layer(index)) for index in ALL}
        assert same == {index: index != 0 for index in ALL}


def renamed(bundle: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {path.replace(old, new): tensor for path, tensor in bundle.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda bundle: renamed(bundle, "0.norm", "1.half"), "for layer language_model.0.; wanted parameters"),
        (lambda bundle: {path: t for path, t in bundle.items() if path != "value/0.norm"}, "wanted parameters"),
        (lambda bundle: {**bundle, "state/step/1.half": torch.tensor(1.0)}, "1.half"),
        (lambda bundle: {**bundle, "value/0.norm": torch.ones(4)}, r"came as torch.float32 \(4,\); wanted torch.float32 \(3,\)"),
        (lambda bundle: {**bundle, "value/0.norm": torch.ones(3).half()}, r"came as torch.float16 \(3,\)"),
    ],
)  # fmt: skip
def test_a_wrong_bundle_changes_nothing(change: Any, words: str) -> None:
    store = trained_store()
    before = bits(store.state.parameters), store.digest(layer(0))
    with pytest.raises(VerifyError, match=words):
        store.put(layer(0), change(trained_store(num_steps=5).bundle(layer(0))))
    assert (bits(store.state.parameters), store.digest(layer(0))) == before


def test_what_is_not_held_is_named() -> None:
    store = empty_store()
    store.hold(layers(1))
    for act in (store.bundle, store.digest):
        with pytest.raises(VerifyError, match=r"language_model\[3\] is asked for and is not held here"):
            act(layer(3))
    with pytest.raises(VerifyError, match=r"language_model\[0\], language_model\[3\] are to be kept and are not held"):
        store.keep(layers(0, 1, 3))
    assert store.held == {layer(1)}


class Counting(torch.optim.SGD):
    """Keeps a plain number."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["count"] = 1


def test_state_that_is_no_tensor() -> None:
    values = initial()
    store = LayerStore(specs(values), values, OptimizerSpec.of(functools.partial(Counting, lr=1.0)))
    store.hold(layers(0))
    store.bundle(layer(0))
    train(store.state.parameters, store.state.optimizer.step, 0, 1)
    with pytest.raises(CheckpointError, match="keeps count of 0.tied as int; only tensors"):
        store.bundle(layer(0))


def test_part_of_a_checkpoint() -> None:
    source = trained_store()
    weights = {name.replace("0.tied", "head"): p.detach() for name, p in source.state.trainable.items()}
    state = source.state.optimizer.state(source.state.trainable)
    store = empty_store()
    for index in (0, 1, 3, 5):
        store.put(layer(index), store.part_of(layer(index), weights, state))
        assert store.digest(layer(index)) == source.digest(layer(index))
    with pytest.raises(CheckpointError, match="no 0.norm of layer language_model.0.; it is of another model"):
        store.part_of(layer(0), {"head": weights["head"]}, {})


def test_optimizer_removes_by_identity() -> None:
    """Equal parameters are not the same one."""
    optimizer = RankOptimizer(OptimizerSpec.of(OPTIMIZERS["adamw"]))
    same = {name: nn.Parameter(torch.ones(3)) for name in "abc"}
    for name, parameter in same.items():
        optimizer.add(name, parameter)
        parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.remove(["b"])
    left = optimizer.optimizer.param_groups[0]["params"][1:]
    assert list(map(id, left)) == [id(same["a"]), id(same["c"])]
    assert len(optimizer.state(["a", "c"])) == 6
    with pytest.raises(KeyError):
        optimizer.state(["b"])
