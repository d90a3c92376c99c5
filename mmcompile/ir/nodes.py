"""Ops that we add to graphs: the loss, the merge of features, attention masks as words, and marks of values that Python read.

Stage sources call these by name, so a reader sees where features enter the text and where the loss is made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.node import has_side_effect

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.convert import words_from_ids


def token_loss(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of cross-entropy over valid tokens, and their number.

    loss_sum = sum over i with labels[i] != ignore_index of -log softmax(logits[i])[labels[i]], computed in float32 or
    in the logits' own dtype if wider; a batch without a valid token gives 0, not NaN.

    Args:
        logits: [tokens, classes] or [batch, classes, tokens], any float dtype.
        labels: [tokens] or [batch, tokens], int64.
        ignore_index: label of tokens without loss.

    Returns:
        (loss_sum [], num_tokens [] int64). The step divides by its total number of valid tokens once, over all
        microbatches.
    """
    wide = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    return F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum"), (labels != ignore_index).sum()


def merge_features(embeddings: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Put modality features, in order, where `mask` is true in the token embeddings.

    Args:
        embeddings: [..., hidden] token embeddings.
        mask: bool, broadcastable to `embeddings`.
        features: at least as many elements as `mask` has true ones, in row-major order.
    """
    return torch.masked_scatter(embeddings, mask, features)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


def with_value(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the value of `new` with the gradient of `old`: `old` after a write that autograd did not record.

    Args:
        old: tensor before the write, of any shape.
        new: tensor of the same shape and dtype; no gradient reaches it.
    """
    return _WithValue.apply(old, new.detach())


def attention_words(
    valid: torch.Tensor | None,
    documents: torch.Tensor | None,
    islands: torch.Tensor | None,
    causal: bool,
    window: int | None,
    batch: int,
    length: int,
) -> torch.Tensor:
    """Return the mask of self-attention as one word a token (`kernels.bitfield_attention.words`).

    visible(q, k) = valid(k) and documents(q) = documents(k) and (k <= q or islands(q) = islands(k) >= 0)

    A token that is not valid gets the padding word 0: no token sees it, and it sees none, so attention's result for it is 0.
    Under a mask that only hides keys this result differs; the loss is the same as long as padding carries no loss.

    Args:
        valid: bool or integer, 0 for padding; None where all tokens are real. Tensors are [B, T], or broadcast to it.
        documents: integers, equal for tokens of one document (packed sample); None for one document a row.
        islands: integers, equal for tokens that see each other in both directions; below 0 for none. None: no islands.
        causal: whether tokens see earlier ones; if not, every token sees its whole document, and `islands` must be
            None.
        window: number of tokens beyond which the model's mask hides keys inside islands too; words cannot express this, so a
            longer island is refused. None: no such limit.
        batch, length: B and T.

    Returns:
        int64 [B, T], on the device of the tensors given.

    Raises:
        MaskError: more ids than a word can number, or an island longer than `window`.
    """
    assert causal or islands is None, "islands are for causal tokens"
    shape = (batch, length)
    given = [x for x in (valid, documents, islands) if x is not None]
    document = torch.ones(shape, dtype=torch.int64, device=given[0].device if given else None)
    if documents is not None:
        document = (documents.long() - documents.min() + 1).broadcast_to(shape)
    if valid is not None:
        document = document.masked_fill(valid.broadcast_to(shape) == 0, 0)
    island = torch.zeros_like(document) if causal else torch.ones_like(document)
    if islands is not None:
        island = (islands.long() + 1).clamp(min=0).broadcast_to(shape)
        if window is not None:
            _check_islands_fit(document, island, window)
    return words_from_ids(document, island, causal=causal)


def _check_islands_fit(document: torch.Tensor, island: torch.Tensor, window: int) -> None:
    # Ids are [B, T], 0 for none.
    _, key = torch.unique((document << 32) | island, return_inverse=True)
    key = key + torch.arange(len(key), device=key.device)[:, None] * (key.max() + 1)
    position = torch.arange(key.shape[1], device=key.device).expand_as(key)
    first = torch.full((int(key.max()) + 1,), key.shape[1], device=key.device)
    first = first.scatter_reduce(0, key.flatten(), position.flatten(), "amin")
    reach = (position - first[key] + 1) * ((island > 0) & (document > 0))
    if int(reach.max()) > window:
        row, last = divmod(int(reach.argmax()), key.shape[1])
        raise MaskError(
            f"row {row}: an island reaches from token {last - int(reach[row, last]) + 1} to {last}, {int(reach[row, last])} "
            f"tokens, but layers with a sliding window of {window} would cut it, which mask words cannot say; "
            "train this model with its own attention, or with images of fewer tokens"
        )


def token_positions(words: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its row: int32 [B, T], 0, 1, 2, ..., on the device of `words`."""
    return torch.arange(words.shape[1], dtype=torch.int32, device=words.device).expand_as(words)


@torch.library.custom_op("mmcompile::value_read", mutates_args=())
def value_read(value: torch.Tensor) -> None:
    """Mark in the graph that Python read the values of `value`: the graph holds only for equal values."""


@value_read.register_fake
def _(value: torch.Tensor) -> None:
    return None


VALUE_READ = torch.ops.mmcompile.value_read.default
has_side_effect(VALUE_READ)
