"""`LayerOutcome`: results of one run of a layer, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, isnan

import torch

_TOLERANCE = 1e-3
"""Maximum difference relative to the largest element of the tensor. Wrong shards differ by about 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOutcome:
    """Results of one run of a layer: name -> tensor on each rank, or a single tensor equal on all ranks."""

    values: Mapping[str, list[torch.Tensor]]
    input_gradients: Mapping[str, list[torch.Tensor]]
    weight_gradients: Mapping[str, list[torch.Tensor]]

    def groups(self) -> Iterator[tuple[str, Mapping[str, list[torch.Tensor]]]]:
        """Yield (kind of results, name -> tensors) for values and for each kind of gradients."""
        yield "value", self.values
        yield "gradient of input", self.input_gradients
        yield "gradient of parameter", self.weight_gradients

    def has_nan(self) -> bool:
        """Return whether any result of the first rank contains a NaN."""
        return any(isnan(_largest(tensor)) for _, group in self.groups() for (tensor, *_) in group.values())


def difference(found: LayerOutcome, wanted: LayerOutcome, least: float) -> str:
    """Describe the first difference between two outcomes; "" if there is none.

    A gradient's difference is relative to its largest element, but at least to `least` times the largest of all gradients.
    """
    gradients = [*wanted.input_gradients.values(), *wanted.weight_gradients.values()]
    largest = max((_largest(grads[0]) for grads in gradients), default=0.0)
    for (label, ours), (_, theirs) in zip(found.groups(), wanted.groups(), strict=True):
        for name in sorted(theirs.keys() ^ ours.keys()):
            return f"{label} {name} is made by {'the ranks' if name in ours else 'the whole layer'} only"
        for name, (right, *_) in theirs.items():
            for rank, tensor in enumerate(ours[name]):
                scale = 0.0 if label == "value" else least * largest
                if told := _worst(tensor, right, scale):
                    where = f" on rank {rank}" if len(ours[name]) > 1 else ""
                    return f"{label} {name}{where} {told}"
    return ""


def _worst(found: torch.Tensor, wanted: torch.Tensor, least: float) -> str:
    """Return text about the largest difference, relative to max(largest of `wanted`, `least`); "" if within the tolerance."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"is {found.dtype} {list(found.shape)}, and {wanted.dtype} {list(wanted.shape)} of the whole layer"
    if not wanted.is_floating_point():
        if torch.equal(found, wanted):
            return ""
        at = int((found != wanted).flatten().long().argmax())
        return f"has {_item(found, at)} where the whole layer has {_item(wanted, at)} (element {at})"
    scale = max(_largest(wanted), least, torch.finfo(wanted.dtype).tiny)
    if isfinite(scale) and _largest(found - wanted) <= _TOLERANCE * scale:
        return ""
    off = torch.where(found == wanted, 0.0, found - wanted).abs().nan_to_num_(nan=torch.inf).flatten()
    if not off.any():
        return ""
    at = int(off.argmax())
    return (
        f"has {_item(found, at)} where the whole layer has {_item(wanted, at)} (element {at} of {list(wanted.shape)}; the "
        f"largest is {scale:.3g}, and differences may reach {_TOLERANCE * scale:.3g})"
    )


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(tensor, torch.inf))


def _item(tensor: torch.Tensor, at: int) -> str:
    item = tensor.flatten()[at].item()
    return f"{item:.4g}" if isinstance(item, float) else str(item)
