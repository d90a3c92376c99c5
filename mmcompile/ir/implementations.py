"""Implementations of attention and experts, chosen while a model is traced, that make one graph for all values.

Packed encoders (images end to end, `cu_seqlens`): transformers loops over images unless the attention implementation's
name has "flash" in it; ours is registered under such a name through its public interface, and calls one op. Experts:
`grouped_mm` can only be traced in bfloat16, and the plain loop asks which experts were hit; `batched_mm` computes the
same in one graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from mmcompile.kernels.packed_attention import packed_attention

_IMPLEMENTATION = "flash_mmcompile_packed"


@contextlib.contextmanager
def packed_towers(model: nn.Module) -> Generator[None]:
    """Let attention modules of `model` that take `cu_seqlens` use `packed_attention` inside the block."""
    configs: dict[int, Any] = {
        id(module.config): module.config
        for module in model.modules()
        if _takes_sequences(type(module))
        and getattr(module.__dict__.get("config"), "_attn_implementation", None) is not None
    }
    if not configs or "transformers" not in sys.modules:
        yield
        return
    _register()
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = _IMPLEMENTATION
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@contextlib.contextmanager
def traceable_experts(model: nn.Module) -> Generator[None]:
    """Let mixture-of-experts layers that could not be traced use `batched_mm` inside the block."""
    configs: dict[int, Any] = {
        id(c): c for module in model.modules() if (c := module.__dict__.get("config")) is not None
    }
    in_bfloat16 = all(p.dtype == torch.bfloat16 for p in model.parameters() if p.dim() == 3)
    changed = {
        key: config._experts_implementation
        for key, config in configs.items()
        if getattr(config, "_experts_implementation", None) in (("eager",) if in_bfloat16 else ("eager", "grouped_mm"))
    }
    for key in changed:
        configs[key]._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        for key, before in changed.items():
            configs[key]._experts_implementation = before


def _register() -> None:
    transformers: Any = sys.modules["transformers"]
    transformers.AttentionInterface.register(_IMPLEMENTATION, _forward)
    transformers.AttentionMaskInterface.register(_IMPLEMENTATION, transformers.masking_utils.flash_attention_mask)


@functools.cache
def _takes_sequences(kind: type[nn.Module]) -> bool:
    """Return True for modules whose forward takes bounds of packed sequences."""
    return "cu_seqlens" in inspect.signature(kind.forward).parameters


def _forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature of transformers: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert cu_seq_lens_q is not None and attention_mask is None and not dropout
    return packed_attention(query, key, value, cu_seq_lens_q, scale).transpose(1, 2), None
