"""How much memory a forward leaves behind for its backward: storages that are still alive once all its values are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Storages(TorchDispatchMode):
    """Notes every storage that an op returns, and its size, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, value: object) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                known = self.found.get(storage._cdata)
                if known is None or known[0].expired():  # or another one at its address
                    self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result


class _Enter(torch.autograd.Function):
    """A value with gradient that autograd does not hold, as a leaf would be."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _entered(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return _Enter.apply(copy, torch.zeros((), requires_grad=True)) if value.requires_grad else copy


def kept_bytes(run: Callable[..., Sequence[Tensor]], inputs: Sequence[Any], permanent: Iterable[Tensor]) -> int:
    """Bytes alive after `run(*inputs)` as long as only the graph edges of its results are held.

    Args:
        inputs: are copied, so that their memory counts too if something needs it.
        permanent: tensors whose memory does not count: parameters and buffers.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in permanent}
    copies = list(map(_entered, inputs))
    with _Storages() as storages:
        storages.note(copies)
        results = run(*copies)
    edges = [get_gradient_edge(result) for result in results if result.requires_grad]
    del copies, results
    alive = [
        (key, size)
        for key, (reference, size) in storages.found.items()
        if not reference.expired() and key not in excluded
    ]
    del edges
    return sum(size for _, size in alive)
