"""Embedding and loss over a sharded vocabulary: `torch.ops.mmcompile.tp_embedding` and `tp_token_loss`.

Rank i of P holds entries i*V/P to (i+1)*V/P of the V entries. Source: Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ReduceOp

from mmcompile.kernels.process_groups import all_reduce, registered_group

_OUTSIDE = "an id lies outside the vocabulary"


@torch.library.custom_op("mmcompile::tp_embedding", mutates_args=())
def tp_embedding(
    weight: torch.Tensor, ids: torch.Tensor, padding_idx: int, group_name: str, count: int
) -> torch.Tensor:
    """Return rows of the ids in this rank's range, zeros for other ids; the sum over ranks (`tp_sum`) is the embedding.

    Args:
        weight: [V/count, hidden], this rank's rows of the table.
        ids: integers of any shape.
        padding_idx: id whose row gets no gradient, -1 for none.
        group_name: name of a group given to `register_group`.
        count: number of ranks in the group.

    Returns:
        [*ids.shape, hidden] in the dtype of `weight`.
    """
    local, own = _own_range(ids, weight.shape[0], group_name, count)
    return F.embedding(local, weight).masked_fill_(~own[..., None], 0)


@tp_embedding.register_fake
def _(weight: torch.Tensor, ids: torch.Tensor, padding_idx: int, group_name: str, count: int) -> torch.Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("mmcompile::tp_embedding_backward", mutates_args=())
def tp_embedding_backward(
    grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int, group_name: str, count: int
) -> torch.Tensor:
    """Return the gradient of this rank's part of the table, [rows, hidden], from the gradient of `tp_embedding`'s result."""
    local, own = _own_range(ids, rows, group_name, count)
    counted = own & (ids != padding_idx)
    return torch.ops.aten.embedding_dense_backward(grad.masked_fill(~counted[..., None], 0), local, rows, -1, False)


@tp_embedding_backward.register_fake
def _(grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int, group_name: str, count: int) -> torch.Tensor:
    return grad.new_empty(rows, grad.shape[-1])


def _save_embedding(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, ids, ctx.padding_idx, ctx.group_name, ctx.count = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    backward = torch.ops.mmcompile.tp_embedding_backward
    return backward(grad, ids, ctx.rows, ctx.padding_idx, ctx.group_name, ctx.count), None, None, None, None


tp_embedding.register_autograd(_embedding_backward, setup_context=_save_embedding)


@torch.library.custom_op("mmcompile::tp_token_loss", mutates_args=())
def tp_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, group_name: str, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `mmcompile.ir.nodes.token_loss` of logits whose classes are sharded; the same on every rank.

    With m the maximum logit of a token and z = m + log(sum over classes of exp(logit - m)), both over all ranks, its
    loss is z - logit[label]. Two all-reduces are run: one for m, one for the sums of exp and the label's logit, which
    is 0 on ranks that do not hold the label.

    Args:
        logits: [tokens, V/count] or [batch, V/count, tokens], any float dtype; computed in float32, or float64 as
            given.
        labels: [tokens] or [batch, tokens], int64.
        ignore_index: label of tokens without loss.

    Returns:
        (loss_sum [], num_tokens [] int64, z of each token in the shape of `labels`).
    """
    wide, group = _wide(logits), registered_group(group_name, count)
    local, own, valid = _own_labels(wide, labels, ignore_index, group_name, count)
    highest = all_reduce(wide.amax(1), group, ReduceOp.MAX)
    exponentials = (wide - highest.unsqueeze(1)).exp_().sum(1)
    chosen = wide.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~own, 0)
    exponentials, chosen = all_reduce(torch.stack((exponentials, chosen)), group).unbind()
    normalizers = exponentials.log_().add_(highest)
    return (normalizers - chosen).masked_fill(~valid, 0).sum(), valid.sum(), normalizers.clone()


@tp_token_loss.register_fake
def _(logits: torch.Tensor, labels: torch.Tensor, *options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    floats = logits.new_empty((), dtype=wide), logits.new_empty(labels.shape, dtype=wide)
    return floats[0], labels.new_empty((), dtype=torch.int64), floats[1]


@torch.library.custom_op("mmcompile::tp_token_loss_backward", mutates_args=())
def tp_token_loss_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    normalizers: torch.Tensor,
    ignore_index: int,
    group_name: str,
    count: int,
) -> torch.Tensor:
    """Return gradients of this rank's logits: softmax - one_hot(label), times `grad`; `normalizers` is z of `tp_token_loss`."""
    wide = _wide(logits)
    local, own, valid = _own_labels(wide, labels, ignore_index, group_name, count)
    softmax = (wide - normalizers.unsqueeze(1)).exp_()
    softmax.scatter_add_(1, local.unsqueeze(1), -own.to(softmax.dtype).unsqueeze(1))
    return softmax.masked_fill_(~valid.unsqueeze(1), 0).mul_(grad).to(logits.dtype)


@tp_token_loss_backward.register_fake
def _(grad: torch.Tensor, logits: torch.Tensor, *options: object) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    logits, labels, ctx.ignore_index, ctx.group_name, ctx.count = inputs
    ctx.save_for_backward(logits, labels, output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _loss_backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None) -> tuple[Any, ...]:
    backward = torch.ops.mmcompile.tp_token_loss_backward
    return backward(grad, *ctx.saved_tensors, ctx.ignore_index, ctx.group_name, ctx.count), None, None, None, None


tp_token_loss.register_autograd(_loss_backward, setup_context=_save_loss)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def _own_labels(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, group_name: str, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, per label, (index in this rank's classes, True if it is one of these, True if it is not `ignore_index`)."""
    valid = labels != ignore_index
    local, own = _own_range(labels.masked_fill(~valid, 0), logits.shape[1], group_name, count)
    return local, own & valid, valid


def _own_range(ids: torch.Tensor, size: int, group_name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, per id, (index in this rank's range of `size` ids, 0 for an id outside; True for an id inside)."""
    # As in torch's own lookups: an error on CPU, a failed assertion on the device on CUDA.
    torch.ops.aten._assert_async.msg(((ids >= 0) & (ids < size * count)).all(), _OUTSIDE)
    local = ids - registered_group(group_name, count).rank() * size
    own = (local >= 0) & (local < size)
    return local.masked_fill(~own, 0), own
