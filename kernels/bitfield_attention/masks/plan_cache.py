"""`PlanCache`: keeps block plans, so that all layers and the backward share the plan of a mask."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Literal, final

import torch

from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan, plan_blocks

Source = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Tensors from which a plan is made: (words, positions, kv_words, kv_positions)."""


@final
class PlanCache:
    """Cache of the least recently used block plans. Threads may share it: autograd runs backward on threads of its own.

    On a CPU masks are compared by content: hashing costs far less than planning, and recomputed or reallocated words
    still hit. On an accelerator reading the content would wait for the device once a layer, so tensors are compared by
    identity and version; the entry holds its tensors, so that no other tensor can get the same address while the entry
    exists.
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._plans: OrderedDict[Hashable, tuple[BlockPlan, Source | None]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def plan(
        self, source: Source, window: int | None, cap: int | Literal["auto"] | None = None, heads_per_launch: int = 1
    ) -> BlockPlan:
        """Return the plan that `plan_blocks` makes of these arguments, from the cache if it has it."""
        on_cpu = source[0].device.type == "cpu"
        key = (_content(source) if on_cpu else _identity(source), window, cap, heads_per_launch)
        with self._lock:
            if (held := self._plans.get(key)) is not None:
                self._plans.move_to_end(key)
                return held[0]
        plan = plan_blocks(*source, window=window, cap=cap, heads_per_launch=heads_per_launch)
        with self._lock:
            self._plans[key] = plan, None if on_cpu else source
            while len(self._plans) > self._size:
                self._plans.popitem(last=False)
        return plan


def _content(source: Source) -> Hashable:
    # Keys are mostly the queries again, the same tensor: it is read once.
    digests = {(x.data_ptr(), x.shape): x for x in source}
    read = {at: hashlib.blake2b(x.contiguous().numpy().data, digest_size=16).digest() for at, x in digests.items()}
    return tuple((read[x.data_ptr(), x.shape], x.shape, x.dtype) for x in source)


def _identity(source: Source) -> Hashable:
    # Inference mode keeps no counter of versions; by autograd's rules nothing can have been changed there.
    return tuple((x.data_ptr(), 0 if x.is_inference() else x._version, x.shape, x.stride(), x.dtype) for x in source)
