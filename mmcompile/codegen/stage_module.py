"""`StageModule`: base of every generated stage class; it holds tensors under the model's own names and runs layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmcompile.codegen.selective import selective_contexts
from mmcompile.codegen.weight_grad_split import DeferredGradient, new_tap
from mmcompile.config import Recompute
from mmcompile.errors import VerifyError
from mmcompile.kernels.sharded_parameters.regather import regathering

Layer = Callable[..., tuple[Tensor, ...]]
LayerRunner = Callable[[Layer, Recompute, tuple[Any, ...]], tuple[Tensor, ...]]
"""Function that runs a layer function on arguments, with a mode of recomputation for its backward."""


def run_eagerly(layer: Layer, recompute: Recompute, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Call a layer function uncompiled, with recomputation in its backward if `recompute` asks for it.

    Recomputed values have the same random numbers, and the same bits: autograd sees the same graph as without recomputation.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return layer(*arguments)
    if recompute == "full":
        return checkpoint(layer, *arguments, use_reentrant=False)
    return checkpoint(layer, *arguments, use_reentrant=False, context_fn=selective_contexts)


class StageModule(nn.Module):
    """Base of generated stages: `self.t["model.layers.0.q.weight"]` and `self.c["rope_table"]`.

    Parameters and buffers also hang in nested submodules, so that `named_parameters()` yields the original dotted
    names. Tensors are kept, not copied: stages built from the same `nn.Parameter` objects share them.

    Args:
        parameters: parameters by original name; `requires_grad` is left as it is.
        buffers: buffers by original name.
        constants: values known at capture, by attribute name.
        device: device of all tensors.
        runner: function that runs the layer functions.
        gathers: True if the stage gathers parameters that replicas share; its backward then gathers them again.
    """

    t: dict[str, Tensor]
    c: dict[str, Tensor]
    device: torch.device
    """Device of the stage's tensors, on which generated code makes new tensors."""
    runner: LayerRunner

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        runner: LayerRunner = run_eagerly,
        *,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        self.t = {**parameters, **buffers}
        self.c = dict(constants)
        self.device = torch.device(device)
        self.runner = runner
        if gathers:
            self.forward = _forgetting(self.forward)
        self._deferred: list[DeferredGradient] | None = None
        for name, parameter in parameters.items():
            owner, leaf = _owner(self, name)
            owner.register_parameter(leaf, parameter)
        for name, buffer in buffers.items():
            owner, leaf = _owner(self, name)
            owner.register_buffer(leaf, buffer)

    def run_deferring(self, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[DeferredGradient, ...]]:
        """Return the stage's results, and the weight gradients that their backward leaves out.

        These are the gradients that the source defers (`self.defer`); the tuple is empty if gradients are disabled.
        """
        self._deferred = []
        try:
            return self(*inputs), tuple(self._deferred)
        finally:
            self._deferred = None

    def run(self, layer: Layer, *arguments: Any) -> tuple[Tensor, ...]:
        """Call a layer function on arguments without recomputation."""
        return self.runner(layer, "none", arguments)

    def recompute(self, recompute: Recompute, layer: Layer, *arguments: Any) -> tuple[Tensor, ...]:
        """Call a layer function on arguments; its backward recomputes activations."""
        return self.runner(layer, recompute, arguments)

    def tap(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tap: zeros of a shape and dtype that belong to a product y = x w^T.

        The backward leaves, as the gradient of the tap, the gradient of y, or x if x is recomputed.
        """
        return new_tap(shape, dtype, self.device)

    def defer(self, tap: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, recomputed: bool = False) -> None:
        """Defer the weight gradient of a product; the arguments are the fields of `DeferredGradient`.

        Raises:
            VerifyError: `run_deferring` is not running, so the gradient would never be computed.
        """
        if not torch.is_grad_enabled():
            return
        if self._deferred is None:
            raise VerifyError(
                "this stage leaves weight gradients for later; call run_deferring, and add what it returns"
            )
        self._deferred.append(DeferredGradient(tap=tap, x=x, weight=weight, bias=bias, recomputed=recomputed))


def _forgetting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that its backward gathers sharded parameters again, instead of keeping the gathered ones."""

    @functools.wraps(forward)
    def run(*inputs: Any) -> Any:
        with regathering():
            return forward(*inputs)

    return run


class _Namespace(nn.Module):
    """Module without a forward, for an inner node of a dotted name."""


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        # Not add_module: a model may call a child "t" or "forward", which is an attribute here.
        root = root._modules.setdefault(part, _Namespace())  # type: ignore[assignment]
    return root, leaf
