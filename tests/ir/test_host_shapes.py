"""The host program: values that Python read, tensors whose shape depends on values, and the number of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.oracles.eager import difference, eager_outcome, graph_outcome, holds_for
from torch import Tensor, nn

from mmcompile.errors import CaptureError, VerifyError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.copy import copied
from mmcompile.ir.host_shapes import HOST_PREFIX, HostResult, attribute, hoist

IGNORE = -100


class Deciding(nn.Module):
    """Reads a list, a number and a truth in Python; selects by a mask; counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.pick = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, lengths: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        hidden = torch.cat([part.cumsum(1) for part in hidden.split(lengths.tolist(), dim=1)], dim=1)
        if bool((input_ids == 0).any()):
            hidden = hidden * 2
        hidden = hidden * int(lengths.max())
        marked = input_ids == 3
        hidden = hidden.index_put((marked,), self.pick(hidden[marked]))
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def _batch(ids: list[int] | None = None, lengths: tuple[int, ...] = (2, 4)) -> dict[str, Tensor]:
    rows = torch.tensor([ids or [1, 3, 5, 3, 7, 9], [4, 3, 2, 1, 3, 3]])
    return {"input_ids": rows, "lengths": torch.tensor(lengths), "labels": rows.masked_fill(rows == 3, IGNORE)}


@pytest.fixture(scope="module")
def deciding() -> tuple[nn.Module, Capture]:
    model = Deciding().double()
    return model, capture(model, _batch())


def _run(found: Capture, batch: dict[str, Tensor]) -> HostResult:
    return found.host.run(batch)


def test_reads_are_what_python_saw_in_order(deciding: tuple[nn.Module, Capture]) -> None:
    _, found = deciding
    assert found.host.num_reads == 3
    assert found.reads[:3] == ([2, 4], False, 4)
    assert _run(found, _batch(lengths=(3, 3))).reads[:3] == ([3, 3], False, 3)
    assert _run(found, _batch(ids=[0, 3, 5, 3, 7, 9])).reads[:3] == ([2, 4], True, 4)


def test_shapes_that_depend_on_values_are_read(deciding: tuple[nn.Module, Capture]) -> None:
    _, found = deciding
    assert (5, 2) in found.reads[3:]
    assert _run(found, _batch(ids=[1, 3, 5, 3, 7, 3])).reads[:3] == found.reads[:3]
    assert _run(found, _batch(ids=[1, 3, 5, 3, 7, 3])).reads != found.reads


def test_positions_of_a_mask_are_host_values(deciding: tuple[nn.Module, Capture]) -> None:
    _, found = deciding
    assert found.host.values
    assert all(name.startswith(HOST_PREFIX) for name in found.host.values)
    placeholders = {str(n.target): n for n in found.graph.module.graph.nodes if n.op == "placeholder"}
    assert {*found.host.values, "input_ids", "labels"} == placeholders.keys()
    values = _run(found, _batch()).values
    wanted = (_batch()["input_ids"] == 3).nonzero()
    assert any(torch.equal(value, wanted) for value in values.values())
    for name, value in values.items():
        node = placeholders[name]
        assert tuple(node.meta["val"].shape) == tuple(value.shape)
        assert node.meta["roots"] == {"input_ids"}
        assert node.meta["from_integers"]


def test_tokens_are_counted_as_the_loss_counts_them(deciding: tuple[nn.Module, Capture]) -> None:
    _, found = deciding
    assert found.host.counts_tokens
    assert _run(found, _batch()).num_tokens == int((_batch()["labels"] != IGNORE).sum())
    nothing = _batch()
    nothing["labels"] = torch.full_like(nothing["labels"], IGNORE)
    assert _run(found, nothing).num_tokens == 0


def test_no_question_and_no_dynamic_shape_is_left_in_the_graph(deciding: tuple[nn.Module, Capture]) -> None:
    _, found = deciding
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    for node in found.graph.module.graph.nodes:
        if node.target is torch.ops.aten.index.Tensor:  # of static shape unless an index is a mask
            assert all(index is None or index.meta["val"].dtype != torch.bool for index in node.args[1])
        else:
            assert not tags & set(getattr(node.target, "tags", ()))
        assert "value_read" not in str(node.target)


def test_the_graph_holds_for_equal_reads_and_is_eager_there(deciding: tuple[nn.Module, Capture]) -> None:
    model, found = deciding
    moved = _batch(ids=[3, 8, 3, 5, 6, 7])  # as many of the marked token, elsewhere
    for batch in (_batch(), moved):
        assert holds_for(model, found, batch)
        assert (outcome := difference(graph_outcome(model, found, batch), eager_outcome(model, batch))).within(1e-12), (
            str(outcome)
        )
    assert not holds_for(model, found, _batch(lengths=(1, 5)))
    assert not holds_for(model, found, _batch(ids=[0, 3, 5, 3, 7, 9]))


class _Marking(nn.Module):
    """Marks positions in a table as long as the largest of them, and asks how many are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
        marks = torch.zeros(int(positions.max()), dtype=torch.int64)
        marks[positions - 1] = 1
        hidden = self.layer(x)
        return {"loss": hidden.sum() if marks.sum() > 1 else hidden.mean()}


def test_a_batch_beyond_a_size_that_was_read_needs_a_new_graph() -> None:
    model, batch = _Marking(), {"x": torch.ones(2, 4), "positions": torch.tensor([1, 3])}
    found = capture(model, batch)
    assert holds_for(model, found, {**batch, "x": torch.zeros(2, 4)})
    assert not holds_for(model, found, {**batch, "positions": torch.tensor([1, 5])})


def test_a_model_that_asks_nothing_has_an_empty_program() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).square().mean()

    found = capture(Plain(), {"x": torch.randn(2, 4)})
    assert (found.host.num_reads, found.host.values, found.host.counts_tokens) == (0, (), False)
    assert found.host.run({"x": torch.randn(2, 4)}) == HostResult(reads=(), values={}, num_tokens=None)


class _Special(nn.Module):
    """Takes the rows of a token that a buffer names, or of hidden values above the value of the buffer."""

    def __init__(self, special: Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.register_buffer("special", special)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden, special = self.embed(input_ids), self.get_buffer("special")
        mask = hidden.mean(-1) > special if special.is_floating_point() else input_ids == special
        return {"loss": hidden[mask].square().mean()}


def test_a_mask_of_inputs_and_a_buffer_is_known_and_one_of_hidden_values_refused_with_the_reason() -> None:
    batch = {"input_ids": torch.tensor([[1, 3, 3], [4, 3, 2]])}
    model = _Special(torch.tensor(3))
    assert difference(graph_outcome(model, capture(model, batch), batch), eager_outcome(model, batch)).identical
    with pytest.raises(
        CaptureError, match=r"a size depends on values .*test_host_shapes.py:\d+: return \{.loss.: hidden\[mask\]"
    ):
        capture(_Special(torch.tensor(0.0)), batch)


def test_attribute_follows_a_dotted_path() -> None:
    linear = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(linear))
    assert attribute(model, "0.0.weight") is linear.weight
    with pytest.raises(AttributeError):
        attribute(model, "0.1.weight")


class Masked(nn.Module):
    """A table of positions that is computed from integers, a mask and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.steps = nn.Buffer(torch.arange(1, 7))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        places = (attention_mask.cumsum(1) * self.steps + (input_ids == 3).sum()).clamp(max=20)
        marked = attention_mask == 0
        hidden = self.embed(input_ids) * torch.cos(places)[..., None]
        hidden = hidden.index_put((marked,), hidden[marked] * 2)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def _masked_batch(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, 16, (2, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[seed % 2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE)}


def _outputs(found: Capture, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    values = {**batch, **found.host.run(batch).values}
    module = found.graph.module
    return module(*(values[str(n.target)] for n in module.graph.nodes if n.op == "placeholder"))


def test_hoisted_values_are_computed_by_the_host() -> None:
    """On the captured batch and on another one; the graph, and the program given, stay as they are."""
    found = capture(Masked().double(), _masked_batch())
    graph = copied(found.graph)
    (places,) = [node for node in graph.module.graph.nodes if "clamp" in str(node.target)]
    host = hoist(graph.module, found.host, {"places": places})
    graph.module.graph.lint()
    made = replace(found, graph=graph, host=host)
    assert host.values == (*found.host.values, "places")
    assert (host.num_reads, host.counts_tokens) == (found.host.num_reads, found.host.counts_tokens)
    placeholders = {str(n.target): n for n in graph.module.graph.nodes if n.op == "placeholder"}
    assert placeholders["places"].meta["roots"] == {"attention_mask", "input_ids"}
    assert placeholders["places"].meta["from_integers"]
    assert "attention_mask" not in placeholders, "only the host reads it now"
    for seed in (0, 1):
        batch = _masked_batch(seed)
        got, wanted = host.run(batch), found.host.run(batch)
        expected = (batch["attention_mask"].cumsum(1) * torch.arange(1, 7) + (batch["input_ids"] == 3).sum()).clamp(
            max=20
        )
        assert torch.equal(got.values["places"], expected)
        assert (got.reads, got.num_tokens) == (wanted.reads, wanted.num_tokens)
        assert all(torch.equal(got.values[name], value) for name, value in wanted.values.items())
        assert all(torch.equal(*pair) for pair in zip(_outputs(made, batch), _outputs(found, batch), strict=True))


def test_a_host_value_may_be_made_of_another() -> None:
    found = capture(Masked().double(), _masked_batch())
    graph = copied(found.graph)
    given = next(n for n in graph.module.graph.nodes if str(n.target).startswith(HOST_PREFIX))
    picks = next(user for user in given.users)
    host = hoist(graph.module, found.host, {"picks": picks})
    batch = _masked_batch(1)
    wanted = (batch["attention_mask"] == 0).nonzero()
    assert any(torch.equal(host.run(batch).values["picks"], column) for column in wanted.T)


def test_what_needs_a_parameter_cannot_be_hoisted() -> None:
    found = capture(Masked().double(), _masked_batch())
    graph = copied(found.graph)
    embedding = next(n for n in graph.module.graph.nodes if "embedding" in str(n.target))
    with pytest.raises(
        VerifyError, match="the host cannot compute .*embed_weight.*: it needs integer inputs and constants"
    ):
        hoist(graph.module, found.host, {"embedded": embedding})
