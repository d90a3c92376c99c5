"""Policy of selective recomputation for torch's checkpointing.

Results of products, convolutions and attention are kept.

Collectives of tensor-parallel layers are kept too, so that they do not run again in the backward, as the cost model assumes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from mmcompile.ir.compat import OpOverload
from mmcompile.passes.cost.op_memory import EXCHANGES

aten = torch.ops.aten

# What composite products and attention consist of once autograd has taken them apart.
_KEPT = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.dot.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    )
)
_OWN_KEPT = ("packed_attention", "bitfield_attention", "context_parallel_attention", *EXCHANGES)
"""Prefixes of the names of mmcompile's ops whose results are kept."""


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the two contexts of selective recomputation; the `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: object, op: OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = op in _KEPT or (op.namespace == "mmcompile" and op.overloadpacket.__name__.startswith(_OWN_KEPT))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
