"""Packed samples train as samples alone do, and nothing of one sample reaches another of its row, forward or backward.

Run through the stage programs of a capture, one stage after another in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.graphs.split import SplitRun, even_plan, root_values, run_split
from support.oracles.eager import Difference, Outcome, difference
from support.oracles.one_process import ADAMW, IGNORE, accumulate, train
from torch import Tensor, fx, nn
from zoo import ALL, Batch, samples

import mmcompile as mm
from mmcompile.batching.isolation import check_packing
from mmcompile.batching.pack import Packer
from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import PatternPrograms
from mmcompile.codegen.program_cache import Patterns
from mmcompile.codegen.stage_programs import lower
from mmcompile.config import Attention
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.inputs import completed
from mmcompile.ir.nodes import token_loss
from mmcompile.passes.capture_pipeline import annotated, run_on_capture
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.masks.bitfield_attention import BitfieldAttention
from mmcompile.passes.pipeline import Pipeline

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "qwen2_audio")
"""Plain positions; three positions a token; features added in the middle of the language model; sounds."""
_PRECISION = 1e-9
_FIRST, _SECOND = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A model cut into stages, for a row of three samples: one medium, another of other length, none."""

    model: nn.Module
    samples: Sequence[Batch]
    captured: Capture
    programs: PatternPrograms

    def batch(self, documents: Sequence[Batch]) -> dict[str, Any]:
        return completed(self.model, Packer.of(self.model).pack(documents))

    def rows(self, number: int) -> slice:
        """Tokens of a sample in the row."""
        lengths = [sample["input_ids"].shape[1] for sample in self.samples]
        return slice(sum(lengths[:number]), sum(lengths[: number + 1]))


@functools.cache
def packed(name: str, attention: Attention = "model") -> Packed:
    model = ALL[name].build(torch.float64)
    documents = samples(ALL[name], 3, seed=4, media=(1, 1, 0), dtype=torch.float64)
    captured = annotated(capture(model, Packer.of(model).pack(documents)))
    if attention == "bitfield":
        captured = run_on_capture(captured, (BitfieldAttention(),)).capture
    programs = lower(captured, even_plan(captured.graph, {"language_model": 2}))
    return Packed(model=model, samples=documents, captured=captured, programs=programs)


CASES: tuple[tuple[str, Attention], ...] = (*((name, "model") for name in FAMILIES), ("llava", "bitfield"))


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_a_packed_row_trains_as_its_samples_alone(name: str, attention: Attention) -> None:
    found = packed(name, attention)
    split = run_split(found.model, found.programs, root_values(found.captured, found.batch(found.samples)))
    compared = _difference(found.model, split, found.samples)
    assert compared.within(_PRECISION), compared


def _difference(model: nn.Module, split: SplitRun, documents: Sequence[Batch]) -> Difference:
    """Of a row run in stages from its samples alone in the eager model."""
    model.zero_grad()
    loss, count = accumulate(model, documents, len(documents))
    assert split.num_tokens == count
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return difference(split.outcome, Outcome(loss=loss, gradients=gradients))


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.parametrize(("changed", "kept"), ((_FIRST, _SECOND), (_SECOND, _FIRST)), ids=("earlier", "later"))
def test_nothing_of_a_sample_reaches_another(name: str, attention: Attention, changed: int, kept: int) -> None:
    found = packed(name, attention)
    other = [_altered(sample) if number == changed else sample for number, sample in enumerate(found.samples)]
    rows = found.rows(kept)
    one, two = (_run(found, documents, kept) for documents in (found.samples, other))
    assert torch.equal(one.logits[:, rows], two.logits[:, rows])
    assert not torch.equal(one.logits[:, found.rows(changed)], two.logits[:, found.rows(changed)])
    assert one.loss == two.loss
    assert one.token_gradients and one.media_gradients
    for label, gradient in one.token_gradients.items():
        assert torch.equal(gradient[:, rows], two.token_gradients[label][:, rows])
        outside = gradient.clone()
        outside[:, rows] = 0
        assert gradient[:, rows].any() and not outside.any(), f"{label}: other samples take part in the loss of one"
    for label in one.media_gradients:
        (own, others), (own_of_other, _) = (_halves(g[label], kept) for g in (one.media_gradients, two.media_gradients))
        assert own.any() and torch.equal(own, own_of_other), label
        assert not others.any(), label


COMPOSITIONS = ((0, 1), (1, 2, 0), (3, 1, 0), (0, 2, 1, 3))
"""Two to four samples, always with the two images of the first two."""


@pytest.mark.parametrize(("name", "attention"), (("llava", "bitfield"), ("qwen2_5_vl", "model")))
def test_two_captures_hold_for_all_compositions(name: str, attention: Attention) -> None:
    model = ALL[name].build(torch.float64)
    documents = samples(ALL[name], 4, seed=5, media=(1, 1, 0, 0), dtype=torch.float64)
    rows = [[documents[number] for number in composition] for composition in COMPOSITIONS]
    batches = [Packer.of(model).pack(row) for row in rows]
    first = capture(model, batches[0])
    Pipeline(passes=(GradientFlow(),)).run(first.graph)
    plan = replace(even_plan(first.graph, {"language_model": 2}), attention=attention)
    patterns = Patterns(model, plan, first, batches[0])
    prepared = [patterns.prepare(batch) for batch in batches]
    assert patterns.num_captures <= 2
    for row, microbatch in zip(rows, prepared, strict=True):
        assert microbatch.num_tokens == sum(int((sample["labels"][:, 1:] != IGNORE).sum()) for sample in row)
    split = run_split(model, prepared[-1].programs, {**prepared[-1].values, **prepared[-1].sizes})
    assert _difference(model, split, rows[-1]).within(_PRECISION)


@pytest.mark.slow
def test_packed_rows_train_over_processes_as_samples_in_one() -> None:
    """Each microbatch of a replica is packed for itself, those of the encoder as those of the language model."""
    steps = [samples(ALL["qwen2_5_vl"], 6, seed=seed, media=(1, 1, 0), dtype=torch.float64) for seed in (1, 2)]
    model, alone = ALL["qwen2_5_vl"].build(torch.float64), ALL["qwen2_5_vl"].build(torch.float64)
    shown = steps[0][:3]
    plan = mm.plan(model, packing=shown, num_microbatches=2, replicas={"language_model": 2})
    with mm.parallelize(model, plan=plan, packing=shown, optimizer=ADAMW) as engine:
        done = [engine.step(step) for step in steps]
    expected = train(alone, steps, num_microbatches=2)
    assert [metrics.num_tokens for metrics in done] == list(expected.num_tokens)
    assert [metrics.loss for metrics in done] == pytest.approx(list(expected.losses), rel=_PRECISION)


@pytest.mark.parametrize("name", ("llava", "gemma3"))
def test_packing_is_said_to_isolate_where_it_does(name: str) -> None:
    """Whatever a version of transformers makes of the masks: the verdict is that of the eager model."""
    model = ALL[name].build(torch.float64)
    documents = samples(ALL[name], 2, seed=4, media=(1, 0), dtype=torch.float64)
    with torch.no_grad():
        together = model(**Packer.of(model).pack(documents), use_cache=False)["logits"]
        alone = torch.cat([model(**document)["logits"] for document in documents], dim=1)
    verdict = check_packing(model, documents)
    assert verdict.isolates == torch.allclose(together, alone, rtol=0, atol=_PRECISION), verdict


def _altered(sample: Batch) -> Batch:
    """Other text and other media in the same places."""
    ids = sample["input_ids"].clone()
    text = (sample["labels"] != IGNORE) & (ids < 900)
    ids[text] = (ids[text] - 5 + 311) % 895 + 5
    media = {name: 1 - value for name, value in sample.items() if value.is_floating_point()}
    return {**sample, **media, "input_ids": ids, "labels": torch.where(text, ids, sample["labels"])}


def _halves(gradient: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Of the two media in the row: that of the sample kept, and the other."""
    halves = gradient.chunk(2)
    return halves[kept], halves[1 - kept]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Forward and backward of the loss of one sample of a row."""

    logits: Tensor
    loss: float
    token_gradients: Mapping[str, Tensor]
    """Of values that cross between stages of the language model, [1, tokens, hidden]."""
    media_gradients: Mapping[str, Tensor]
    """Of pixels or sounds."""


def _run(found: Packed, documents: Sequence[Batch], number: int) -> _Run:
    batch = found.batch(documents)
    labels = torch.full_like(batch["labels"], IGNORE)
    labels[:, found.rows(number)] = batch["labels"][:, found.rows(number)]
    roots = root_values(found.captured, {**batch, "labels": labels})
    media = {n: v.requires_grad_() for n, v in roots.items() if isinstance(v, Tensor) and v.is_floating_point()}
    tensors = {**dict(found.model.named_parameters(remove_duplicate=False)), **dict(found.model.named_buffers())}
    made: dict[str, Any] = dict(roots)
    waiting = list(found.programs.programs.values())
    while waiting:
        program = next(p for p in waiting if all(port.name in made for port in p.inputs))
        waiting.remove(program)
        results = load_stage(program, tensors)(*(made[port.name] for port in program.inputs))
        made |= {port.name: result for port, result in zip(program.outputs, results, strict=True)}
    links = {
        port.name for program in found.programs.programs.values() for port in program.inputs if port.kind == "link"
    }
    values = {name: made[name] for name in links if made[name].requires_grad}
    tokens = {n: v for n, v in values.items() if v.dim() == 3 and v.shape[:2] == batch["input_ids"].shape}
    wanted = {**tokens, **media}
    gradients = dict(zip(wanted, torch.autograd.grad(made["loss_sum"], list(wanted.values())), strict=True))
    return _Run(
        logits=_Logits(found.captured.graph.module).of(roots),
        loss=float(made["loss_sum"].detach()),
        token_gradients={name: gradients[name] for name in tokens},
        media_gradients={name: gradients[name] for name in media},
    )


class _Logits(fx.Interpreter):
    """Runs a captured graph up to what its loss reads."""

    def of(self, roots: Mapping[str, Any]) -> Tensor:
        """[1, T, vocabulary]."""
        with torch.no_grad():
            self.run(*(roots[str(n.target)] for n in self.module.graph.nodes if n.op == "placeholder"))  # type: ignore[union-attr]
        return self.logits.view(1, -1, self.logits.shape[-1])

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is token_loss:
            self.logits = args[0]
        return super().call_function(target, args, kwargs)
