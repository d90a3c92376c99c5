"""The loss: found in a model's output, and made our own in a graph where it is a mean cross-entropy."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mmcompile.errors import BatchError
from mmcompile.ir.graph import LossInfo, results_of
from mmcompile.ir.nodes import token_loss

aten = torch.ops.aten

_LOSS_PRESERVING = (
    aten.view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.alias.default,
    aten.clone.default,
)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output: `.loss`, `["loss"]`, the first entry of a tuple, or the output itself."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, (tuple, list)):
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = "none" if loss is None else f"{type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}"
        raise BatchError(
            f"the model returned no scalar loss (got {got}); pass `labels` in the batch, or let forward return a scalar, "
            "a mapping with 'loss', or an object with .loss"
        )
    return loss


def own_loss(graph: fx.Graph) -> LossInfo:
    """Replace a loss that is a mean cross-entropy by mmcompile's op `token_loss`.

    Return the form of the loss, with a reason if it was not replaced.
    """
    output = graph.output_node()
    (loss,) = results_of(graph)
    node = loss
    while node.op == "call_function" and node.target in _LOSS_PRESERVING:
        node = node.all_input_nodes[0]
    if node.target is not aten.cross_entropy_loss.default:
        return LossInfo(per_token=False, reason=f"the loss ends in {_op_name(node)}, not in a cross-entropy")
    arguments: dict[str, Any] = dict(
        zip(("self", "target", "weight", "reduction", "ignore_index", "label_smoothing"), node.args, strict=False)
    )
    arguments.update(node.kwargs)
    if (
        arguments.get("reduction", 1) != 1
        or arguments.get("weight") is not None
        or arguments.get("label_smoothing", 0.0)
    ):
        return LossInfo(per_token=False, reason="the cross-entropy is weighted, smoothed or not a mean")
    if arguments["target"].meta["val"].is_floating_point():
        return LossInfo(per_token=False, reason="the cross-entropy has class probabilities as targets")
    with graph.inserting_before(node):
        logits = _before_narrowing(arguments["self"])
        pair = graph.call_function(token_loss, (logits, arguments["target"], arguments.get("ignore_index", -100)))
        pair.meta = dict(node.meta)
        results = []
        for index, value in enumerate((node.meta["val"], arguments["target"].meta["val"].sum())):
            item = graph.call_function(operator.getitem, (pair, index))
            item.meta = {**node.meta, "val": value}
            results.append(item)
        pair.meta["val"] = tuple(item.meta["val"] for item in results)
    output.args = (tuple(results),)
    return LossInfo(per_token=True)


def _before_narrowing(logits: fx.Node) -> fx.Node:
    """Return the node of the logits as it is before a cast from float64 to float32 that follows their computation.

    Models cast logits to float32 to widen half types; in a float64 model the cast narrows, and is removed.
    """
    chain = [logits]
    while chain[-1].target in (*_LOSS_PRESERVING, aten.slice.Tensor, aten.select.int, aten.transpose.int):
        chain.append(chain[-1].all_input_nodes[0])
    cast = chain[-1]
    if cast.target is aten.to.dtype and cast.all_input_nodes[0].meta["val"].dtype == torch.float64:
        wide = cast.all_input_nodes[0]
        cast.replace_all_uses_with(wide, delete_user_cb=lambda user: user in chain)
        return wide if cast is logits else logits
    return logits


def _op_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
