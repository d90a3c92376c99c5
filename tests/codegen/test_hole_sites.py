"""What batches of one kind differ in is taken to differ in batches of another kind too: one example of it makes one capture."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from support.graphs.split import even_plan, run_split
from support.oracles.eager import difference, eager_outcome
from torch import Tensor, nn

from mmcompile.captured_model import captured_step
from mmcompile.codegen.program_cache import Patterns


class Reader(nn.Module):
    """Words, and pictures of any size whose patches are packed, with a table of positions that Python cuts to the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.look = nn.Embedding(16, 8), nn.Linear(6, 8)
        self.table = nn.Embedding(64, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 16)

    def forward(
        self, input_ids: Tensor, labels: Tensor, patches: Tensor | None = None, sizes: Tensor | None = None
    ) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        places = torch.arange(input_ids.shape[1]).repeat(len(input_ids), 1)
        longest = int((input_ids != 0).sum(1).max())
        hidden = hidden + self.table(places.clamp(max=longest - 1))
        if patches is not None and sizes is not None:
            parts = torch.cat([part[: len(part) - 1] for part in self.look(patches).split(sizes.tolist())])
            hidden = hidden.masked_scatter((input_ids == 1).unsqueeze(-1), parts)
        return {"loss": F.cross_entropy(self.head(self.body(hidden)).flatten(0, 1), labels.flatten())}


def _batch(length: int, *sizes: int, rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    marks = sum(size - 1 for size in sizes)
    ids = torch.randint(2, 16, (rows, length), generator=generator)
    ids.view(-1)[:marks] = 1
    batch = {"input_ids": ids, "labels": ids.clone()}
    if sizes:
        batch |= {"patches": torch.randn(sum(sizes), 6, generator=generator), "sizes": torch.tensor(sizes)}
    return batch


def _check(model: nn.Module, patterns: Patterns, batch: Mapping[str, Tensor]) -> None:
    prepared = patterns.prepare(batch)
    outcome = run_split(model, prepared.programs, {**prepared.values, **prepared.sizes}).outcome
    assert (gap := difference(outcome, eager_outcome(model, batch))).within(1e-5), str(gap)


def test_one_batch_without_media_makes_one_capture_for_all_of_any_length() -> None:
    model = Reader()
    batches = [_batch(9, 4, 3), _batch(12, 3, 5, 4, rows=3), _batch(15, 6, 3)]
    first = captured_step(model, batches[0])
    patterns = Patterns(model, even_plan(first.graph, {}), first, batches[0])
    patterns.warm_up(batches)
    assert patterns.num_captures == 2
    for batch in (_batch(20, 5), _batch(11, 4, 4, 4, rows=4)):
        _check(model, patterns, batch)
    assert patterns.num_captures == 2
    for length, rows in ((10, 2), (17, 3), (30, 4), (7, 2)):
        _check(model, patterns, _batch(length, rows=rows))
        assert patterns.num_captures == 3


def test_a_warm_up_learns_the_kind_with_most_batches_first() -> None:
    model = Reader()
    batches = [_batch(8), _batch(9, 4, 3), _batch(12, 3, 5, 4, rows=3), _batch(15, 6, 3)]
    first = captured_step(model, batches[1])
    patterns = Patterns(model, even_plan(first.graph, {}), first, batches[1])
    patterns.warm_up(batches)
    assert patterns.num_captures == 3
    _check(model, patterns, _batch(19, rows=3))
    assert patterns.num_captures == 3
