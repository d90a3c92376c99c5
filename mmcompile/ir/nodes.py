"""Nodes we author: the loss, the merge, and the mark of a value that Python read.

Stage sources call these by name, so a reader sees where features enter the text and where the loss is made.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx.node import has_side_effect

MERGE = "merge_features"


def token_loss(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of cross-entropy over valid tokens, and their number.

    loss_sum = sum over i with labels[i] != ignore_index of -log softmax(logits[i])[labels[i]], computed in float32 or in the
    logits' own dtype if wider; a batch without a valid token gives 0, not NaN.

    Args:
        logits: [tokens, classes] or [batch, classes, tokens], any float dtype.
        labels: [tokens] or [batch, tokens], int64.
        ignore_index: label of tokens without loss.

    Returns:
        (loss_sum [], num_tokens [] int64). The step divides by its total number of valid tokens once, over all microbatches.
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


@torch.library.custom_op("mmcompile::value_read", mutates_args=())
def value_read(value: torch.Tensor) -> None:
    """Marks in the graph that Python read this tensor's values: the graph holds for equal values only."""


@value_read.register_fake
def _(value: torch.Tensor) -> None:
    return None


VALUE_READ = torch.ops.mmcompile.value_read.default
has_side_effect(VALUE_READ)
