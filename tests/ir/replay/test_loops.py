"""Loops over images that compute: which are packed into one call, what they then compute, and which stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.graphs.learned import check, learned
from torch import Tensor, nn

from mmcompile.errors import CaptureError
from mmcompile.ir.capture import Capture
from mmcompile.ir.capture_errors import Mismatch
from mmcompile.ir.inputs import completed
from mmcompile.ir.replay.learning import Learner

aten = torch.ops.aten


class Tower(nn.Module):
    """Base of models that treat one image after another; `grid` [images, 2] says how high and wide they are, in patches."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def image(self, patches: Tensor, height: int, width: int) -> Tensor:
        """Return the features of an image, [tokens, 6]."""
        raise NotImplementedError

    def forward(self, patches: Tensor, grid: Tensor, labels: Tensor) -> dict[str, Tensor]:
        parts = patches.split(grid.prod(1).tolist())
        made = [self.image(part, height, width) for part, (height, width) in zip(parts, grid.tolist(), strict=True)]
        return {"loss": F.cross_entropy(self.head(torch.cat(made)), labels)}


class Projected(Tower):
    """A norm, a layer and an activation for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))

    def image(self, patches: Tensor, height: int, width: int) -> Tensor:
        return F.gelu(self.layer(self.norm(patches)) * self.scale) + patches


class Resized(Tower):
    """Each image at half its size."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def image(self, patches: Tensor, height: int, width: int) -> Tensor:
        image = patches.view(1, height, width, 6).permute(0, 3, 1, 2)
        small = F.interpolate(image, size=(height // 2, width // 2), **self.options)
        return small.permute(0, 2, 3, 1).reshape(-1, 6)


class Positioned(Tower):
    """A learned table of positions, resized to each image."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 5, 6))

    def image(self, patches: Tensor, height: int, width: int) -> Tensor:
        table = self.table.permute(2, 0, 1).unsqueeze(0)
        large = F.interpolate(table, size=(height, width), mode="bilinear", align_corners=False, antialias=True)
        return patches + large.squeeze(0).permute(1, 2, 0).reshape(-1, 6)


class Chained(Tower):
    """Every image is shifted by the mean of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.last: Tensor | None = None

    def forward(self, patches: Tensor, grid: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.last = None
        return super().forward(patches, grid, labels)

    def image(self, patches: Tensor, height: int, width: int) -> Tensor:
        made = self.layer(patches if self.last is None else patches + self.last)
        self.last = made.mean(0, keepdim=True)
        return made


def batch(*grid: tuple[int, int], part: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Return images of some sizes, whose features have one token for every `part` patches."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(grid)
    return {
        "patches": torch.randn(int(sizes.prod(1).sum()), 6, generator=generator),
        "grid": sizes,
        "labels": torch.randint(0, 3, (int(sizes.prod(1).sum()) // part,), generator=generator),
    }


def num(found: Capture, name: str) -> int:
    return sum(name in str(node.target) for node in found.graph.module.graph.nodes if node.op == "call_function")


def test_layers_that_treat_rows_alike_run_once_for_all_images() -> None:
    model = Projected()
    found = learned(model, [batch((2, 4), (4, 4)), batch((4, 2), (2, 6), (4, 4))])
    assert (num(found, "layer_norm"), num(found, "gelu"), num(found, "addmm") + num(found, "linear")) == (1, 1, 2)
    for grid in (((2, 2),), ((6, 2), (2, 2)), ((2, 4), (4, 6), (2, 2), (8, 2))):
        check(model, found, batch(*grid, seed=len(grid)))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "bilinear"},
        {"mode": "bicubic", "align_corners": False},
        {"mode": "bilinear", "antialias": True},
        {"mode": "nearest"},
        {"mode": "bilinear", "align_corners": True},
        {"mode": "area"},
    ],
    ids=str,
)
def test_a_resize_of_every_image_is_a_weighted_sum_of_rows(options: dict[str, object]) -> None:
    model = Resized(**options)
    found = learned(model, [batch((4, 8), (4, 4), part=4), batch((4, 4), (6, 4), (8, 4), part=4)])
    assert not num(found, "upsample")
    for grid in (((4, 10),), ((6, 6), (4, 4)), ((8, 8), (4, 6), (4, 4), (10, 6))):
        check(model, found, batch(*grid, part=4, seed=len(grid)))


def test_a_table_resized_for_every_image_is_read_once() -> None:
    model = Positioned()
    found = learned(model, [batch((2, 4), (4, 4)), batch((7, 2), (9, 6), (3, 3))])
    for grid in (((5, 5),), ((12, 2), (2, 2)), ((2, 4), (4, 6), (7, 7), (8, 2))):
        check(model, found, batch(*grid, seed=len(grid)))


def test_a_turn_that_needs_the_one_before_is_not_packed() -> None:
    model = Chained()
    found = learned(model, [batch((2, 4), (4, 4)), batch((4, 2), (2, 6), (4, 4))])
    check(model, found, batch((4, 2), (2, 6), (4, 4), seed=5))
    with pytest.raises(Mismatch, match=r"test_loops.py:\d+|layer"):
        found.filled(completed(model, batch((2, 4), (4, 4))))


class Padded(nn.Module):
    """Clips of a mono sound, end to end, each padded to the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(6, 4, 3, padding=1)

    def forward(self, sound: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        clips = nn.utils.rnn.pad_sequence(list(sound.split(lengths.tolist())), batch_first=True)
        wider = F.pad(clips, (0, 0, 1, int(lengths.max()) % 3))
        return {"loss": self.layer(wider.transpose(1, 2)).square().mean()}


def test_clips_padded_to_the_longest_are_one_gather() -> None:
    model = Padded()
    sounds = [
        {"sound": torch.randn(sum(n), 6), "lengths": torch.tensor(n)} for n in ((5, 3), (4, 9, 2), (7,), (3, 3, 11, 2))
    ]
    found = learned(model, sounds[:2])
    for sound in sounds:
        check(model, found, sound)
    assert num(found, "aten.index.Tensor") == 1


class Last(nn.Module):
    """Takes the last rows, by a bound below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: Tensor, count: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(rows).cumsum(0)[-int(count) :].square().mean()}


def test_bounds_below_zero_may_differ() -> None:
    model = Last()
    batches = [{"rows": torch.randn(9 + n, 6), "count": torch.tensor(n)} for n in (2, 5, 3, 7)]
    found = learned(model, batches[:2])
    for given in batches:
        check(model, found, given)


class Hooked(nn.Module):
    """Changes the gradient of a hidden tensor by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(rows)
        hidden.register_hook(lambda gradient: 2 * gradient)
        return {"loss": hidden.square().mean()}


def test_a_hook_on_a_gradient_is_refused() -> None:
    with pytest.raises(CaptureError, match="registers a hook on a tensor's gradient"):
        Learner(Hooked()).see(completed(Hooked(), {"rows": torch.randn(3, 6)}))
