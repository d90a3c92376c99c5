"""`StageModule`: what every generated stage class derives from. It holds tensors under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class StageModule(nn.Module):
    """Base of generated stages: `self.t["model.layers.0.q.weight"]` and `self.c["rope_table"]`.

    Parameters and buffers also hang in nested submodules, so that `named_parameters()` yields the original dotted
    names. Tensors are kept, not copied: stages built from the same `nn.Parameter` objects share them.

    Args:
        parameters: by original name; `requires_grad` is left as it is.
        buffers: by original name.
        constants: values known at capture, by attribute name.
        device: where all of them are.
    """

    t: dict[str, Tensor]
    c: dict[str, Tensor]
    device: torch.device
    """Where its tensors live; sources make new tensors there."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.t = {**parameters, **buffers}
        self.c = dict(constants)
        self.device = torch.device(device)
        for name, parameter in parameters.items():
            owner, leaf = _owner(self, name)
            owner.register_parameter(leaf, parameter)
        for name, buffer in buffers.items():
            owner, leaf = _owner(self, name)
            owner.register_buffer(leaf, buffer)


class _Namespace(nn.Module):
    """An inner node of a dotted name; it only holds."""


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the last part of a dotted name, made where missing."""
    *path, leaf = name.split(".")
    for part in path:
        # Not add_module: a model may call a child "t" or "forward", which is an attribute here.
        root = root._modules.setdefault(part, _Namespace())  # type: ignore[assignment]
    return root, leaf
