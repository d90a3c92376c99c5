"""`regathering`: whole parameters are released after the forward, and gathered again by the backward that reads them.

Autograd would keep a gathered weight from a layer's forward to its backward, of every layer and every microbatch in
flight, and sharing parameters would save nothing. Inside `regathering`, autograd saves a handle instead: the rank's
part, and the view of the whole parameter to restore.

All ranks of the group must run the same backward, as they must run the same forward.

Source: `reshard_after_forward` of FSDP2 (Zhao et al., PyTorch FSDP, section 3.3), as hooks on what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A gathered whole parameter: a weak reference to its memory, and the function that gathers it again."""

    storage: StorageWeakRef
    again: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Handle:
    """Object that autograd saves in place of a whole parameter, or in place of a view of one."""

    again: Callable[[], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.again().as_strided(self.size, self.stride, self.offset)


# By address of the storage, which nobody else gets as long as the weak reference is there.
_PRESENT: ContextVar[dict[int, _Gathered] | None] = ContextVar("gathered", default=None)


@contextmanager
def regathering() -> Generator[None]:
    """Context in which a forward keeps no whole parameters for its backward, which gathers them again."""
    token = _PRESENT.set({})
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _PRESENT.reset(token)


def note_gathered(whole: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
    """Register the function that gathers a whole parameter again. Has no effect outside of `regathering`."""
    present = _PRESENT.get()
    if present is not None:
        storage = whole.untyped_storage()
        present[storage._cdata] = _Gathered(StorageWeakRef(storage), again)  # pyright: ignore[reportPrivateUsage]


def _pack(tensor: torch.Tensor) -> torch.Tensor | _Handle:
    found = (_PRESENT.get() or {}).get(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]
    if found is None or found.storage.expired():
        return tensor
    return _Handle(found.again, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(kept: torch.Tensor | _Handle) -> torch.Tensor:
    return kept.tensor() if isinstance(kept, _Handle) else kept
