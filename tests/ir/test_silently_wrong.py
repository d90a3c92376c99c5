"""Captures that were silently wrong, each kind at its root: the graph equals eager, or the capture is refused with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracles.eager import Misfit, difference, eager_outcome, graph_outcome, misfit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import ALL

import mmcompile as mm
from mmcompile.errors import CaptureError
from mmcompile.ir import functional, gradient_proof
from mmcompile.ir.capture import capture, verified

Batch = dict[str, Any]


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(6, 4, generator=generator),
        "lengths": torch.tensor([2, 4]),
        "labels": torch.tensor([0, 1, 2, 3, -100, -100]),
    }


class Between(nn.Module):
    """Two linears with a function between them."""

    def __init__(self, between: Callable[[Tensor, Batch], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.between(self.first(inputs["x"]), inputs)
        return {"loss": F.cross_entropy(self.last(hidden), inputs["labels"])}


def assert_as_eager(model: nn.Module, given: Batch | None = None) -> None:
    given = batch() if given is None else given
    found = capture(model, given)
    torch.manual_seed(0)
    got = graph_outcome(model, found, given)
    torch.manual_seed(0)
    wanted = eager_outcome(model, given)
    assert difference(got, wanted).within(1e-6), str(difference(got, wanted))


# In-place writes into tensors made in forward: their gradient was lost.

FACTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(x.shape[0], 4, device=x.device),
    "new_zeros": lambda x: x.new_zeros(6, 4),
    "zeros_like": torch.zeros_like,
    "zeros with dtype": lambda x: torch.zeros((6, 4), dtype=x.dtype, device=x.device),
    "empty_like": lambda x: torch.empty_like(x).zero_(),
    "full": lambda x: torch.full((6, 4), 0.0),
    "ones": lambda x: torch.ones(6, 4) * 0,
    "tensor": lambda x: torch.tensor([[0.0] * 4] * 6),
    "clone": lambda x: x.detach().clone(),
    "expand": lambda x: torch.zeros(1, 4).expand(6, 4).contiguous(),
}


def _add(a: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    a += v
    return a


def _mask(a: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    a[labels == 1] = v[labels == 1]
    return a


def _slice(a: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    a[:, 1:3] = v[:, 1:3]
    return a


def _rows(a: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    for index in range(3):
        a[index, :2] = v[index, :2]
    return a


def _chunks(a: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    a.view(2, 3, 4).transpose(0, 1)[1].add_(v[:2])
    return a


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": _add,
    "mask": _mask,
    "index_add_": lambda a, v, labels: a.index_add_(0, labels.clamp(min=0), v),
    "slice": _slice,
    "rows": _rows,
    "copy_": lambda a, v, labels: a.copy_(v),
    "masked_scatter_": lambda a, v, labels: a.masked_scatter_(labels[:, None] == 1, v),
    "scatter_add_": lambda a, v, labels: a.scatter_add_(0, labels.clamp(min=0)[:, None].expand(6, 4), v),
    "views": _chunks,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("factory", FACTORIES)
def test_writes_into_factories_keep_their_gradient(factory: str, write: str) -> None:
    assert_as_eager(Between(lambda h, given: h + WRITES[write](FACTORIES[factory](given["x"]), h, given["labels"])))


# Tensors that a region without gradient returns as they came.


@pytest.mark.parametrize(
    "look", [lambda h: h.to(h.dtype), lambda h: h.contiguous(), lambda h: F.dropout(h, 0.0, False)]
)
def test_a_tensor_looked_at_under_no_grad_keeps_its_gradient(look: Callable[[Tensor], Tensor]) -> None:
    """An op with nothing to do returns its input; in the graph, the input is then a result of the region."""

    def between(hidden: Tensor, given: Batch) -> Tensor:
        with torch.no_grad():
            positive = look(hidden).sum(-1, keepdim=True) > 0
        return hidden.masked_fill(positive, 0.0)

    assert_as_eager(Between(between))


# Integer buffers: constants of the model's own, which Python may read unless the forward changes them.


class Strided(nn.Module):
    """Takes every second row, by a buffer, as codecs of transformers do; with `counts`, by a buffer that its forward changes."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("stride", torch.tensor(2))
        self.counts = counts

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.first(inputs["x"])[:: int(self.stride)]
        if self.counts:
            self.stride += 1
        return {"loss": F.cross_entropy(self.last(hidden), inputs["labels"][:3])}


def test_constant_buffers_are_read_and_changing_ones_refused() -> None:
    assert_as_eager(Strided(counts=False))
    with pytest.raises(CaptureError, match="a buffer that changes"):
        capture(Strided(counts=True), batch())


# Sizes that depend on values: another batch was said to hold.

SIZES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "rows of a mask": lambda h, given: h / h[given["labels"] != -100].shape[0],
    "length of nonzero": lambda h, given: h / len((given["labels"] != -100).nonzero()),
    "arange of a count": lambda h, given: h + torch.arange(h[given["labels"] != -100].shape[0]).sum(),
    "unique": lambda h, given: h * torch.unique(given["labels"]).numel(),
    "unique_consecutive": lambda h, given: h * len(torch.unique_consecutive(given["labels"], return_counts=True)[1]),
    "sum as a number": lambda h, given: h / int((given["labels"] != -100).sum()),
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_depend_on_values_are_guarded(size: str) -> None:
    model, other = Between(SIZES[size]), batch(1) | {"labels": torch.tensor([0, 1, -100, -100, -100, -100])}
    found = capture(model, batch())
    assert misfit(model, found, other) is Misfit.VALUES_READ
    assert difference(graph_outcome(model, found, batch()), eager_outcome(model, batch())).within(1e-6)


# Values of inputs that Python reads in other ways than `.item()`.


def _offsets(lengths: Tensor) -> list[Any]:
    """Sums written into a tensor made by `torch.empty`, as ERNIE does."""
    offsets = torch.empty(2, dtype=torch.long)
    offsets[0] = 0
    offsets[1:] = lengths.cumsum(0)[-1:]
    return list(offsets)


def _marked(first: Tensor, last: Tensor) -> Tensor:
    """A mask written at places given by tuples of 0-d tensors, as UDOP does."""
    mask = torch.ones(6, 4)
    mask[(first, last), (first - 1, last - 1)] = 0.0
    return mask


READS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "write by tuples of 0-d tensors": lambda h, given: h * _marked(*given["lengths"]),
    "padding by 0-d tensors": lambda h, given: F.pad(h, (0, 0, given["lengths"][0], 1))[2:8],
    "counts in an empty tensor": lambda h, given: h[torch.arange(*_offsets(given["lengths"]))],
    "positions of a condition": lambda h, given: h[torch.where(given["labels"] >= 0)[0]].sum() + h,
    "new of a list": lambda h, given: h * (1 + h.new([True])) if given["labels"].new([1]).any() else h,
    "repeated rows": lambda h, given: torch.repeat_interleave(h, given["lengths"].repeat(3), dim=0)[:6],
    "repeated elements": lambda h, given: h + h.repeat_interleave(given["lengths"][:1], 0)[:6].mean(),
    "masked_select": lambda h, given: h + h.masked_select((given["labels"] > 0)[:, None]).sum(),
    "arange of 0-d tensors": lambda h, given: h[torch.arange(given["lengths"][0] - 2, given["lengths"][1] + 2)],
    "narrow": lambda h, given: h.narrow(0, given["lengths"][0] - 2, 6),
    "split": lambda h, given: torch.cat(h.split(given["lengths"].tolist())).sum() + h,
    "slices": lambda h, given: torch.cat([h[: given["lengths"][0]], h[given["lengths"][0] :]]),
    "numpy": lambda h, given: (
        h + torch.from_numpy(given["lengths"].numpy() * 2).sum() + int(np.asarray(given["lengths"]).sum())
    ),
    "full": lambda h, given: h * torch.full((6, 1), given["lengths"][1], dtype=torch.float),
    "bool of new_zeros": lambda h, given: (
        h * 2 if h.new_zeros(6, dtype=torch.bool).index_fill(0, given["lengths"], True).any() else h
    ),
}


def _mask_of_an_activation(h: Tensor, given: Batch) -> Tensor:
    mask = h.new_ones((6,))
    mask[given["lengths"][0] : given["lengths"][1]] = 0
    return h[mask.bool()].sum() + h


def _index_of_a_mask(h: Tensor, given: Batch) -> Tensor:
    mask = h.new_ones(2, 6, dtype=torch.long)
    mask[0, given["lengths"][0] :] = 0
    return h + h[int(mask.cumsum(1)[0].argmax())]


@pytest.mark.parametrize("read", [*READS.values(), _mask_of_an_activation, _index_of_a_mask])
def test_known_values_are_used(read: Callable[[Tensor, Batch], Tensor]) -> None:
    assert_as_eager(Between(read))


def test_a_mask_of_a_large_float_input_is_known() -> None:
    """Idefics leaves out images whose pixels are all 0."""
    given = batch() | {"pixels": torch.rand(2, 6, 20_000)}
    given["pixels"][:, 3] = 0

    def between(h: Tensor, inputs: Batch) -> Tensor:
        rows = inputs["pixels"].view(12, -1)
        real = (rows == 0.0).sum(-1) != rows.shape[-1]
        real[0] |= ~torch.any(real)
        return h + rows[real].mean() + h.repeat(2, 1)[real].sum()

    model = Between(between)
    assert_as_eager(model, given)
    other = given | {"pixels": torch.rand(2, 6, 20_000)}
    assert misfit(model, capture(model, given), other) is Misfit.VALUES_READ


def test_a_size_that_depends_on_an_activation_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on values that are not known during capture|decision in Python"):
        capture(Between(lambda h, given: h + h[h > 0].sum()), batch())


# Gradients that a graph does not have.


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradient


def _hooked(h: Tensor, given: Batch) -> Tensor:
    h.register_hook(lambda gradient: gradient * 2)
    return h


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda h, given: Reversed.apply(h), "the autograd function .*Reversed, whose backward is Python"),
        (_hooked, "a hook on a tensor's gradient"),
        (lambda h, given: torch.func.grad(lambda z: z.pow(3).sum())(h), "does not train what the model trains"),
    ],
)
def test_gradients_that_a_graph_does_not_have_are_refused(between: Callable[..., Tensor], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(Between(between), batch())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_functions_are_captured_as_their_computation(reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    model = Between(lambda h, given: checkpoint(lambda x: layer(x).sin(), h, use_reentrant=reentrant))
    model.layer = layer
    assert_as_eager(model)


def test_the_proof_finds_a_lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the old rewriting of in-place ops (a detached view of a constant is computed again from it), training is refused."""
    lost = functional._update

    def detaching(graph: Any, node: Any, target: Any) -> Any:
        return functional._call(graph, node, torch.ops.aten.detach.default, lost(graph, node, target))

    monkeypatch.setattr(functional, "_update", detaching)
    with pytest.raises(
        CaptureError, match=r"gradient in the model and none in the graph: first.bias, first.weight \(read by first\)"
    ):
        capture(Between(lambda h, given: _add(torch.zeros(6, 4), h, given["labels"])), batch())


_MADE = ("zeros", "full", "ones", "empty")


def _made_by_a_factory(node: Any) -> bool:
    while not any(name in str(node.target) for name in _MADE):
        if not node.args or not isinstance(node.args[0], type(node)):
            return False
        node = node.args[0]
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["musicgen", "lxmert", "parakeet_tdt", "qwen2_audio_merged"])
def test_the_proof_finds_what_was_silently_wrong_in_other_peoples_models(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rewriting taken back: what is written into a tensor made by a factory has no gradient."""
    right = functional._update

    def detaching(graph: Any, node: Any, target: Any) -> Any:
        updated = right(graph, node, target)
        if not _made_by_a_factory(target):
            return updated
        return functional._call(graph, node, torch.ops.aten.detach.default, updated)

    monkeypatch.setattr(functional, "_update", detaching)
    with pytest.raises(CaptureError, match="does not train what the model trains"):
        capture(ALL[name].build(), ALL[name].batch())


def test_the_proof_reads_autograds_own_record() -> None:
    model = Between(lambda h, given: h.detach())
    loss = model(**batch())["loss"]
    paths = gradient_proof.gradient_paths(loss, dict(model.named_parameters()))
    assert paths.trained == {"last.weight", "last.bias"}
    assert paths.steps["loss"] == {"NllLoss 0"} and paths.steps["Addmm 0"] == {"last.weight", "last.bias"}


def test_the_proof_finds_a_lost_path_where_all_parameters_still_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum around a layer detached: every parameter gets a gradient, and it is wrong."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> dict[str, Tensor]:
            hidden = self.first(x)
            kept = hidden.clone()
            kept += self.middle(hidden)
            return {"loss": F.cross_entropy(self.last(kept), labels)}

    lost = functional._update

    def detaching(graph: Any, node: Any, target: Any) -> Any:
        return lost(graph, node, functional._call(graph, node, torch.ops.aten.detach.default, target))

    monkeypatch.setattr(functional, "_update", detaching)
    with pytest.raises(
        CaptureError,
        match=r"by other paths: from Add 0 to Addmm 0 \(before: first.bias, first.weight\) in the model only",
    ):
        capture(Around(), batch())


def test_gradients_and_loss_are_compared_with_eager_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Between(lambda h, given: _add(torch.zeros(6, 4), h, given["labels"]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = batch()
    found = verified(model, given, capture(model, given))
    assert found.num_parameters == len(list(model.parameters())) and found.gradient == found.loss == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())

    def doubled(graph: Any, node: Any, target: Any) -> Any:
        return functional._call(graph, node, torch.ops.aten.add.Tensor, target, node.args[1], alpha=2)

    monkeypatch.setattr(functional, "_update", doubled)
    mm.capture(model, given)  # gradients take the same paths
    with pytest.raises(CaptureError, match="not compute what the model computes: loss differs from eager by .* wanted"):
        mm.capture(model, given, verify="gradients")


def _added_under_a_mask(h: Tensor, given: Batch) -> Tensor:
    mask = (given["labels"] == 1)[:, None].expand_as(h)
    return h.masked_scatter(mask, h[mask] * 2)


def test_a_mask_expanded_to_an_activations_shape_stays_known() -> None:
    assert_as_eager(Between(_added_under_a_mask))


def _moved_by(step: int, start: int) -> Callable[[Tensor, Batch], Tensor]:
    def write(h: Tensor, given: Batch) -> Tensor:
        turned = h.clone().transpose(0, 1)
        turned[start::step] = turned[: turned.shape[0] - start : step]
        return turned.transpose(0, 1)

    return write


def _doubled_in_place(h: Tensor, given: Batch) -> Tensor:
    some = h.clone()[:, ::2]
    some.unsqueeze(0).add_(some)  # the same elements in the same order
    return torch.cat([some, some], 1)


def test_a_write_that_reads_a_part_of_what_it_writes_is_refused() -> None:
    """Its result depends on the order in which elements are copied, which torch leaves open."""
    with pytest.raises(CaptureError, match=r"reads a part of what it writes.*cannot be made functional"):
        capture(Between(_moved_by(1, 1)), batch())
    assert_as_eager(Between(_moved_by(2, 1)))  # every other one, from its neighbour
    assert_as_eager(Between(_doubled_in_place))


# Randomness outside torch.

DRAWS: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "numpy array": lambda h, given: h * torch.from_numpy(np.random.rand(6, 1)).float(),
    "numpy permutation": lambda h, given: h[torch.from_numpy(np.random.permutation(6))],
    "numpy scalar": lambda h, given: h * 2 if np.random.rand() > 0.5 else h,
    "python": lambda h, given: h * random.uniform(0.5, 1.5),
    "python scalar": lambda h, given: h * random.random(),
    "generator without a seed": lambda h, given: h * float(np.random.default_rng().random()),
    "bits without a seed": lambda h, given: h * float(np.random.Generator(np.random.PCG64()).random()),
    "state without a seed": lambda h, given: h * float(np.random.RandomState(None).rand()),
    "generator of Python without a seed": lambda h, given: h * random.Random().random(),
    "generator of the system": lambda h, given: h * random.SystemRandom(3).random(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_of_numpy_and_python_are_refused(draw: str) -> None:
    with pytest.raises(CaptureError, match=r"test_silently_wrong.py:\d+: .*draw with torch"):
        capture(Between(DRAWS[draw]), batch())


@pytest.mark.parametrize("generator", [np.random.default_rng(0), np.random.RandomState(0), random.Random(0)], ids=type)
def test_generators_that_a_module_keeps_are_refused_by_name(generator: Any) -> None:
    model = Between(lambda h, given: h * (1 + float(generator.random())))
    model.first.noise = generator
    with pytest.raises(CaptureError, match="random numbers from first.noise while it was traced"):
        capture(model, batch())


def test_random_numbers_that_decide_nothing_are_none() -> None:
    """Layer drop of rate 0, as models of transformers write it."""
    assert_as_eager(Between(lambda h, given: h if random.uniform(0, 1) < 0.0 or np.random.random() < 0 else h * 2))
    assert_as_eager(Between(lambda h, given: h * float(np.random.default_rng(3).random())))
    assert_as_eager(Between(lambda h, given: h * float(np.random.RandomState(3).rand())))
    assert_as_eager(
        Between(lambda h, given: h * isinstance(random.Random(3), random.Random) * random.Random(x=3).random())
    )


# Batches with nested tensors, and tensors that a capture must not mark.


@dataclass
class Target:
    classes: Tensor
    weight: float


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, targets: dict[str, Any], parts: list[dict[str, Tensor]], target: Target) -> Tensor:
        hidden = self.head(x)
        loss = F.cross_entropy(hidden, targets["classes"][0]) + target.weight * F.cross_entropy(hidden, target.classes)
        return loss + sum(hidden[part["rows"]].mean() for part in parts)


def nested(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def classes() -> Tensor:
        return torch.randint(0, 4, (6,), generator=generator)

    return {
        "x": torch.randn(6, 4, generator=generator),
        "targets": {"classes": (classes(), "unused")},
        "parts": [{"rows": classes()}, {"rows": classes()}],
        "target": Target(classes(), 0.5),
    }


def test_nested_tensors_are_inputs() -> None:
    model = Nested()
    found = capture(model, nested(0))
    assert [spec.name for spec in found.graph.inputs] == [
        "x",
        "targets__classes__0",
        "parts__0__rows",
        "parts__1__rows",
        "target__classes",
    ]
    for seed in (0, 1):
        given = nested(seed)
        assert misfit(model, found, given) is None
        model.zero_grad()
        wanted = model(**given)
        wanted.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        got = graph_outcome(model, found, given)
        assert got.loss == wanted.item()
        assert all(torch.equal(a, b) for a, b in zip(got.gradients.values(), gradients, strict=True))


def test_a_capture_leaves_the_batch_and_the_model_as_they_were() -> None:
    class Caching(Between):
        def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
            if not hasattr(self, "table"):
                self.table = torch.arange(4.0)
            return super().forward(**{**inputs, "x": inputs["x"] + self.table})

    model, given = Caching(lambda h, given: h), batch()
    capture(model, given, varying={"x": (0,), "labels": (0,)})
    assert not hasattr(model, "table")
    assert all(not [name for name in vars(value) if "dynamo" in name] for value in given.values())
    assert_as_eager(model)
