"""What torch itself says a forward and backward cost: FLOPs by dispatch, bytes by the hooks of autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from mmcompile.kernels.packed_attention import packed_ops as ops

aten = torch.ops.aten


def _unwrapped(formula: Callable[..., int]) -> Callable[..., int]:
    """The formula over shapes, which FlopCounterMode wraps itself."""
    return inspect.unwrap(formula)


def _packet(op: Any) -> object:
    """The overload packet under which dispatch sees a custom op."""
    return op._opoverload.overloadpacket


def _packed_forward(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, **_: object) -> int:
    """Two products per segment."""
    squares = int((cu_seqlens.diff().long() ** 2).sum())
    return 2 * query.shape[1] * (query.shape[-1] + value.shape[-1]) * squares


def _packed_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object, **_: object) -> int:
    """Five products per segment: the scores again, and four gradients."""
    (cu_seqlens, _scale) = rest
    assert isinstance(cu_seqlens, Tensor)
    squares = int((cu_seqlens.diff().long() ** 2).sum())
    return 2 * query.shape[1] * (3 * query.shape[-1] + 2 * value.shape[-1]) * squares


# FlopCounterMode passes tensors, not shapes, to a formula so marked.
_packed_forward._get_raw = _packed_backward._get_raw = True  # type: ignore[attr-defined]

# torch registers attention formulas for its CUDA kernels only.
_FORMULAS: dict[object, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _unwrapped(sdpa_flop),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _unwrapped(sdpa_backward_flop),
    _packet(ops.packed_attention): _packed_forward,
    _packet(ops.packed_attention_backward): _packed_backward,
}


ResultT = TypeVar("ResultT")


def count_flops(run: Callable[[], ResultT]) -> tuple[ResultT, int]:
    """(what `run` returns, FLOPs it took)."""
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        result = run()
    return result, counter.get_total_flops()


def counted_flops(run: Callable[[], Tensor]) -> tuple[int, int]:
    """(forward, backward) FLOPs of a loss."""
    loss, forward = count_flops(run)
    return forward, count_flops(loss.backward)[1]


@contextmanager
def saved_storages(kept: dict[int, Tensor]) -> Iterator[None]:
    """Put a tensor of every storage that autograd keeps for backward into `kept`, by storage."""

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def saved_bytes(run: Callable[[], object], permanent: Iterable[Tensor]) -> int:
    """Bytes of distinct storages kept for backward, those of `permanent` (parameters, buffers) excluded."""
    excluded = {tensor.untyped_storage()._cdata for tensor in permanent}
    kept: dict[int, Tensor] = {}
    with saved_storages(kept):
        run()
    return sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in excluded)
