"""`check_packing`: whether a model keeps packed documents apart, found on a capture of two of them in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmcompile.batching.pack import Packer, token_dims
from mmcompile.data.collate import IGNORED_LABEL, Sample, Value
from mmcompile.errors import BatchError, CaptureError, ConfigError, PlanError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.inputs import completed
from mmcompile.passes.masks.document_isolation import documents_meet
from mmcompile.passes.masks.packed_values import PackedBatch
from mmcompile.planner.plan.plan_record import Packing

_IN_PLACE = ("position_ids", "labels")
_ISOLATED = "masks made from position_ids are block-diagonal, and nothing else mixes tokens"


def check_packing(model: nn.Module, samples: Sequence[Sample], pad: Mapping[str, int | float] | None = None) -> Packing:
    """Check whether packing isolates documents, at the cost of one capture.

    Encoders compute media as in a padded batch, so layers that mix samples there (batch normalization in training) mix them in a
    packed row too.

    Args:
        model: model with weights, or a skeleton made from its configuration.
        samples: conversations as `Packer.pack` takes them; the first two are packed; they should differ in length and have media.
        pad: padding value of media by input name, as in `Packer.of`.

    Raises:
        ConfigError: fewer than two samples.
    """
    if len(samples) < 2:
        raise ConfigError(
            f"packing is checked on two samples in one row, got {len(samples)}; give a batch of two or more"
        )
    documents = samples[:2]
    try:
        packer = Packer.of(model, pad)
        batch = packer.pack(documents)
        captured = capture(model, batch)
        swapped = packer.pack(documents[::-1])
        lengths = tuple(_num_tokens(packer.pack([document])) for document in documents)
    except (PlanError, BatchError, CaptureError) as error:
        return Packing(isolates=False, reason=str(error))

    def inputs(values: Mapping[str, Value], order: tuple[int, ...], kept: tuple[int, ...]) -> PackedBatch:
        return PackedBatch(values=captured.values(completed(model, values)), order=order, lengths=lengths, kept=kept)

    others = [inputs(swapped, (1, 0), (0, 1))]
    others += [inputs(_with_other_tokens(batch, lengths, number), (0, 1), (1 - number,)) for number in (0, 1)]
    reason = _loss_reason(captured, batch) or documents_meet(captured.graph, inputs(batch, (0, 1), (0, 1)), others)
    return Packing(isolates=reason is None, reason=reason or _ISOLATED)


def _with_other_tokens(batch: Mapping[str, Value], lengths: Sequence[int], number: int) -> dict[str, Value]:
    """Return a packed batch in which document `number` has other tokens: its own, rotated by a third of its length."""
    first, last = sum(lengths[:number]), sum(lengths[: number + 1])
    found = dict(batch)
    for name, dim in token_dims(batch):
        value = batch[name]
        if isinstance(value, Tensor) and name not in _IN_PLACE:
            part = value.narrow(dim, first, last - first).roll(1 + (last - first) // 3, dim)
            found[name] = value.index_copy(dim, torch.arange(first, last), part)
    return found


def _num_tokens(batch: Mapping[str, Value]) -> int:
    ids = batch["input_ids"]
    assert isinstance(ids, Tensor)
    return ids.shape[1]


def _loss_reason(captured: Capture, batch: Mapping[str, Value]) -> str | None:
    """Return the reason why the loss of packed documents is not the sum of their separate losses; None if it is."""
    name, labels = captured.graph.name, batch.get("labels")
    if not captured.graph.loss.per_token or not isinstance(labels, Tensor):
        return f"the loss of {name} is no sum over tokens: {captured.graph.loss.reason or 'the batch has no labels'}"
    first = torch.full_like(labels, IGNORED_LABEL)
    first[:, 0] = 0
    if captured.host.run(captured.given({**batch, "labels": first})).num_tokens:
        return (
            f"the loss of {name} counts the first label of a row, so it does not shift labels, and the first of every document, "
            "which packing leaves out, would be lost"
        )
    return None
