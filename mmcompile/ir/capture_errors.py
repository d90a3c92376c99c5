"""Errors of a capture: who is to blame (the batch, the model's Python, or this package), and on which line."""

from __future__ import annotations

import inspect
import re
import traceback
from pathlib import Path

import torch
from torch import fx, nn

from mmcompile import errors
from mmcompile.errors import BatchError, CaptureError
from mmcompile.ir.compat import VALUES_NEEDED, fake_mode_of
from mmcompile.ir.inputs import FlatBatch
from mmcompile.ir.tracing_context import python_state_kept


class Mismatch(Exception):
    """A graph does not hold for a batch: the model's Python calls something else; the text names the line where it does."""


def explained(model: nn.Module, batch: FlatBatch, error: Exception) -> BatchError | CaptureError:
    """Return a BatchError if the model itself refuses the batch, else a CaptureError; both name the line of the model's code."""
    name, where = type(model).__name__, _line_of(error)
    text = str(error).strip().split("\n")[0][:400]
    shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in batch.items() if isinstance(v, torch.Tensor))
    symbolic = ("data-dependent", "Could not guard", "unbacked", "GuardOnDataDependent", "DataDependent")
    if any(word in f"{type(error).__name__} {error}" for word in symbolic):
        return CaptureError(
            f"{name} makes a decision in Python on a value that depends on activations, on a buffer that changes, or on a "
            f"random number{where}: {text}. Only values of the inputs are known during capture; compute the decision from "
            "integer inputs, or with torch.where"
        )
    refusal = _eager_error(model, batch)
    if refusal is None:
        return CaptureError(
            f"{name} runs on the batch, but could not be traced{where}: {type(error).__name__}: {text}. Got {shapes}"
        )
    text = str(refusal).strip().split("\n")[0][:400]
    return BatchError(
        f"{name} refused the batch{_line_of(refusal)}: {type(refusal).__name__}: {text}. Got {shapes}; check "
        "that every input is there and that placeholder tokens match the features"
    )


def _eager_error(model: nn.Module, batch: FlatBatch) -> Exception | None:
    mode = fake_mode_of(model)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    if mode is not None:
        tensors = {name: mode.from_tensor(value, static_shapes=True) for name, value in tensors.items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=()), python_state_kept(model), torch.no_grad():
        try:
            torch.func.functional_call(model, buffers, (), batch.arguments(tensors))
        except VALUES_NEEDED:
            return None  # a model without weights, whose Python needs values
        except Exception as error:  # whatever the model's own Python raises
            return error
    return None


def line_of_node(node: fx.Node) -> str:
    """Return the line of the model's code that made a node, or its module if the node has no trace: `file:line: code`."""
    for made in (node, *node.all_input_nodes):
        lines = [line.strip() for line in made.meta.get("stack_trace", "").strip().splitlines()]
        found = re.fullmatch(r'File "(.*)", line (\d+), in .*', lines[-2]) if len(lines) > 1 else None
        if found is not None:
            return f"{found[1].rpartition('site-packages/')[2]}:{found[2]}: {lines[-1]}"
    return node.meta.get("module_path") or "the model itself"


def _line_of(error: Exception) -> str:
    # " (file:line: code)"
    packages = tuple(str(Path(inspect.getfile(module)).parent) for module in (torch, errors))
    cause: BaseException | None = error
    found = ""
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            if not frame.filename.startswith((*packages, "<")):
                found = f" ({frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}: {frame.line})"
        cause = cause.__cause__
    return found
