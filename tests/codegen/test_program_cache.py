"""One pattern serves every batch it holds for; a new one is captured only where shapes or values that Python read differ."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import sympy
import torch
import torch.nn.functional as F
from support.graphs.split import captured, eager_from_logits, even_plan, run_split, with_present_flags
from support.oracles.eager import difference, eager_outcome
from torch import Tensor, nn
from zoo import ALL, Batch, Size

from mmcompile.codegen.program import PreparedMicrobatch, RowCount
from mmcompile.codegen.program_cache import Patterns
from mmcompile.errors import BatchError
from mmcompile.ir.capture import capture
from mmcompile.planner.plan.plan import Plan

NAME = "two_encoder_net"


class Asking(nn.Module):
    """Its Python asks whether a word is there, and repeats its layer as often as an input says."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, repeats: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        if (input_ids == 3).any():
            hidden = self.layers[0](hidden)
        for _ in range(int(repeats.sum())):
            hidden = self.layers[1](hidden)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def _asking(*tokens: int, repeats: int) -> dict[str, Tensor]:
    ids = torch.tensor([tokens, tokens[::-1]])
    return {"input_ids": ids, "repeats": torch.tensor([repeats]), "labels": ids}


class _Zoo:
    """The patterns of the two-encoder model, three language stages, and the captures they made."""

    def __init__(self) -> None:
        self.model, self.batch, first = captured(NAME)
        first = with_present_flags(self.model.requires_grad_(True), first)
        self.plan = even_plan(first.graph, {"language_model": 3})
        self.captures: list[int] = []
        self.patterns = Patterns(self.model, self.plan, first, self.batch, lambda count, _: self.captures.append(count))

    def check(self, batch: Mapping[str, Tensor]) -> PreparedMicrobatch:
        """Prepare a batch, and compare its stages with eager."""
        prepared = self.patterns.prepare(batch)
        run = run_split(self.model, prepared.programs, {**prepared.values, **prepared.sizes})
        wanted, num_tokens = eager_from_logits(self.model, batch)
        assert prepared.num_tokens == run.num_tokens == num_tokens
        assert (outcome := difference(run.outcome, wanted)).within(1e-9), str(outcome)
        shapes = {crossing.output.name: crossing.shape for crossing in run.crossings}
        assert prepared.link_shapes == shapes
        return prepared


@pytest.fixture(scope="module")
def zoo() -> _Zoo:
    return _Zoo()


def _draw(size: Size, seed: int) -> Batch:
    return ALL[NAME].draw(size, seed=seed, dtype=torch.float64)


def test_other_values_of_the_same_shapes_use_the_same_pattern(zoo: _Zoo) -> None:
    before = zoo.patterns.num_captures
    first = zoo.check(zoo.batch)
    again = zoo.check(_draw(ALL[NAME].first, seed=9))
    padded = zoo.check(ALL[NAME].padded_batch("right", dtype=torch.float64))
    assert first.programs is again.programs is padded.programs
    assert first.sizes == {}
    assert zoo.patterns.num_captures == before == 1


def test_other_lengths_take_one_symbolic_capture_and_then_none(zoo: _Zoo) -> None:
    before = zoo.patterns.num_captures
    longer = zoo.check(_draw(Size(samples=3, length=72, media=2), seed=2))
    assert zoo.patterns.num_captures == before + 1
    assert zoo.captures[-1] == before
    symbolic = [port.shape for program in longer.programs.programs.values() for port in program.outputs]
    assert any(isinstance(size, str) for shape in symbolic for size in shape)
    for samples, length, media in [(4, 80, 2), (5, 61, 1), (2, 100, 3), (3, 50, 1)]:
        prepared = zoo.check(_draw(Size(samples=samples, length=length, media=media), seed=length))
        assert prepared.programs is longer.programs
    assert zoo.patterns.num_captures == before + 1
    assert zoo.check(zoo.batch).programs is not longer.programs


def test_a_batch_without_media_has_no_encoder_program(zoo: _Zoo) -> None:
    before = zoo.patterns.num_captures
    text = ALL[NAME].text_only_batch(torch.float64)
    prepared = zoo.check(text)
    assert list(prepared.programs.programs) == [f"language_model.{index}" for index in range(3)]
    assert zoo.check(_draw(Size(samples=2, length=48, media=0), seed=8)).programs is prepared.programs
    assert zoo.patterns.num_captures == before + 1


def test_programs_of_all_patterns_read_the_parameters_that_the_plan_gives_their_stage(zoo: _Zoo) -> None:
    """One rank holds a stage's parameters once, whatever pattern runs."""
    first = zoo.patterns.prepare(zoo.batch).programs.programs
    text = zoo.patterns.prepare(ALL[NAME].text_only_batch(torch.float64)).programs.programs
    for name, program in text.items():
        assert set(program.parameters) <= set(first[name].parameters)
    assert {name for program in first.values() for name in (spec.name for spec in program.parameters)} <= set(
        zoo.patterns.parameters()
    )


def test_values_that_python_reads_make_patterns_of_their_own() -> None:
    model, batch = Asking().double(), _asking(1, 2, 3, 4, repeats=2)
    first = with_present_flags(model, capture(model, batch))
    captures: list[int] = []
    patterns = Patterns(model, even_plan(first.graph, {}), first, batch, lambda count, _: captures.append(count))
    seen: dict[str, int] = {}
    for tokens, repeats in [
        ((1, 2, 3, 4), 2),
        ((3, 9, 9, 8), 2),  # the word is there again
        ((1, 2, 5, 4), 2),  # it is not
        ((1, 2, 3, 4), 3),  # more repeats
        ((6, 2, 5, 4), 2),
        ((3, 3, 3, 3), 3),
    ]:
        batch = _asking(*tokens, repeats=repeats)
        prepared = patterns.prepare(batch)
        run = run_split(model, prepared.programs, prepared.values)
        assert (outcome := difference(run.outcome, eager_outcome(model, batch))).within(1e-12), str(outcome)
        seen.setdefault(prepared.programs.pattern, len(captures))
    assert patterns.num_captures == len(seen) == 3
    assert captures == [1, 2]


def test_each_later_capture_tells_the_reason_and_the_line_of_python_that_decided() -> None:
    model = Asking().double()
    batch = _asking(1, 2, 3, 4, repeats=2)
    first = with_present_flags(model, capture(model, batch))
    told: list[tuple[int, str]] = []
    patterns = Patterns(model, even_plan(first.graph, {}), first, batch, lambda *event: told.append(event))
    patterns.warm_up([_asking(1, 3, 3, 4, repeats=2), _asking(1, 2, 3, 5, 6, repeats=2)])
    patterns.prepare(_asking(1, 2, 3, 4, repeats=3))
    patterns.prepare({**batch, "labels": batch["labels"].to(torch.int32)})
    assert [count for count, _ in told] == [1, 2, 3]
    assert [reason for _, reason in told] == patterns.reasons
    sizes, line, inputs = patterns.reasons
    assert sizes == "input_ids has size 5 in dim 1, in the captured batch 4"
    assert re.fullmatch(r"test_program_cache.py:\d+, head: head where the other batch calls layers.1", line), line
    assert inputs == "no earlier batch had these inputs: input_ids, repeats, labels"


def test_a_warm_up_learns_one_capture_from_all_batches_of_a_family(zoo: _Zoo) -> None:
    model, batch, first = captured(NAME)
    first = with_present_flags(model.requires_grad_(True), first)
    told: list[tuple[int, int]] = []
    patterns = Patterns(model, even_plan(first.graph, {"language_model": 3}), first, batch, lambda *_: None)
    sizes = [(4, 80, 2), (5, 61, 1), (2, 100, 3), (3, 50, 1), (6, 144, 4)]
    batches = [_draw(Size(samples=s, length=length, media=media), seed=length) for s, length, media in sizes]
    patterns.warm_up(batches[:3], lambda number, about, _: told.append((number, about)))
    assert told == [(2, 2)]
    for batch in batches:
        patterns.prepare(batch)
    assert patterns.num_captures == 2 == 1 + len(patterns.reasons)


def test_parameters_come_under_every_name_they_have() -> None:
    model = Asking().double()
    model.head.weight = model.embed.weight
    batch = _asking(1, 2, 3, 4, repeats=1)
    first = with_present_flags(model, capture(model, batch))
    plan: Plan = even_plan(first.graph, {})
    named = Patterns(model, plan, first, batch).parameters()
    assert named["head.weight"] is named["embed.weight"] is model.embed.weight


def test_a_batch_the_model_refuses_is_refused_and_leaves_no_pattern(zoo: _Zoo) -> None:
    before = zoo.patterns.num_captures
    batch = {name: value for name, value in zoo.batch.items() if name != "attention_mask"}
    for _ in range(2):
        with pytest.raises(BatchError, match="TwoEncoderNet refused the batch"):
            zoo.patterns.prepare(batch)
    assert zoo.patterns.num_captures == before


def test_rows_of_a_value_follow_from_those_of_an_input() -> None:
    """Four patches of an image make one of its rows; a sample without images has none."""
    merged, hidden = sympy.symbols("merged hidden", integer=True, positive=True)
    count = RowCount(expression=merged * hidden, inputs={merged: ("pixels", 4 * merged)}, sizes={hidden: 2})
    assert count.of({"pixels": 12}) == 6
    assert count.of({}) == 0
    assert count.of({"pixels": 13}) is None
