"""One capture for batches of any sizes: what it computes, when it is refused, and what it does not take for granted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from support.graphs.learned import check, learned
from torch import Tensor, nn
from zoo import ALL
from zoo.free_sizes import free_batch

from mmcompile.errors import CaptureError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.capture_errors import Mismatch
from mmcompile.ir.inputs import FlatBatch, completed
from mmcompile.ir.replay.learning import Learner

FAMILIES = ("qwen2_5_vl", "glm4v", "pixtral", "llava_next", "lfm2_vl", "qwen2_audio")
SLOW = ("qwen2_vl", "mistral3", "idefics2", "idefics3", "smolvlm", "qwen3_vl", "kimi_k25")


def after_plain(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> Capture:
    """Capture a model from some batches, with the components of a plain capture."""
    return learned(model, batches, capture(model, batches[0]).graph.components)


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_one_capture_holds_for_media_of_any_number_and_size(name: str) -> None:
    model = ALL[name].build()
    found = after_plain(model, [free_batch(name, seed, media) for seed, media in ((1, 2), (2, 3), (3, 2))])
    for seed, media in ((11, 3), (12, 2), (13, 4)):
        check(model, found, free_batch(name, seed, media))


class Crops(nn.Module):
    """Crops rows to lengths that an input gives, packs them, and marks their starts in a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.scale = 1

    def forward(self, rows: Tensor, lengths: Tensor, labels: Tensor) -> dict[str, Tensor]:
        packed = torch.cat([row[:length] for row, length in zip(self.inside(rows), lengths.tolist(), strict=True)])
        starts = torch.zeros(len(packed), dtype=torch.long)
        for start in (lengths.cumsum(0) - lengths).tolist():
            starts[start] = 1
        hidden = packed * (1 + starts[:, None])
        return {"loss": F.cross_entropy(self.head(hidden), labels)}


def _crops(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(len(lengths), max(lengths) + 1, 6, generator=generator),
        "lengths": torch.tensor(lengths),
        "labels": torch.randint(0, 3, (sum(lengths),), generator=generator),
    }


def test_crops_of_any_number_are_one_gather_and_written_tables_come_from_the_host() -> None:
    model = Crops()
    found = after_plain(model, [_crops(3, 5), _crops(4, 2, 6)])
    for lengths in ((2, 2), (7, 3, 4, 5), (9, 1)):
        check(model, found, _crops(*lengths, seed=sum(lengths)))
    assert sum(node.target is torch.ops.aten.cat.default for node in found.graph.module.graph.nodes) == 0


def test_one_row_holds_where_no_function_asks_for_its_number() -> None:
    model = Crops()
    found = after_plain(model, [_crops(3, 5), _crops(4, 2, 6)])
    check(model, found, _crops(4))


class Branching(nn.Module):
    """Takes another layer where an input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, kind: Tensor) -> dict[str, Tensor]:
        chosen = self.one if int(kind.sum()) else self.other
        return {"loss": chosen(x).square().mean()}


def test_another_branch_is_another_capture_and_names_its_line() -> None:
    model = Branching()
    found = after_plain(model, [{"x": torch.randn(n, 4), "kind": torch.ones(n, dtype=torch.long)} for n in (2, 3)])
    with pytest.raises(Mismatch, match="one: one where the other batch calls linear"):
        found.filled(completed(model, {"x": torch.randn(3, 4), "kind": torch.zeros(3, dtype=torch.long)}))


class Remembering(nn.Module):
    """A layer that scales by what the model left in it, as no argument tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _Scaled()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Tensor) -> dict[str, Tensor]:
        self.layer.factor = int(factor.sum())
        return {"loss": self.head(self.layer(x)).square().mean()}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def test_what_a_forward_leaves_in_a_module_is_not_taken_for_an_argument() -> None:
    model = Remembering()
    batches = [{"x": torch.randn(n, 4), "factor": torch.tensor([n])} for n in (2, 3)]
    with pytest.raises(CaptureError, match="otherwise than the model does"):
        after_plain(model, batches)


class Asking(nn.Module):
    """Drops rows of padding, which it finds by the values of its floats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = x[~(x == 0).all(dim=1)]
        return {"loss": self.linear(kept).square().mean()}


def test_questions_about_float_inputs_are_answered_by_the_host() -> None:
    def rows(kept: int, empty: int) -> dict[str, Tensor]:
        return {"x": torch.cat([torch.randn(kept, 4), torch.zeros(empty, 4)])}

    model = Asking()
    found = after_plain(model, [rows(3, 1), rows(2, 3)])
    for kept, empty in ((4, 4), (5, 0), (2, 1)):
        check(model, found, rows(kept, empty))


class Custom(torch.autograd.Function):
    """The identity, as Python of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Hidden(nn.Module):
    """Calls a function that torch does not report."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Custom.apply(self.linear(x)).square().mean()


def test_an_autograd_function_of_the_models_own_is_refused() -> None:
    with pytest.raises(CaptureError, match="autograd function"):
        Learner(Hidden()).see(FlatBatch({"x": torch.randn(3, 4)}))
