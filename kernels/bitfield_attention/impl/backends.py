"""Choice of the implementation for a call of bitfield attention."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, get_args

import torch

from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention.impl.triton_configs import DTYPES, HEAD_DIMS

Impl = Literal["auto", "eager", "triton"]


def resolve_impl(impl: str, q: torch.Tensor, v: torch.Tensor) -> Literal["eager", "triton"]:
    """Return the implementation that runs: "auto" is Triton on CUDA and eager torch elsewhere.

    Args:
        impl: "auto", "eager" or "triton".
        q: queries, [B, H, Tq, D]. v: values, [B, Hkv, Tk, Dv].

    Raises:
        ConfigError: an unknown name, or Triton for arguments that its kernels do not support.
    """
    if impl not in get_args(Impl):
        raise ConfigError(
            f"impl={impl!r} is no implementation of bitfield attention; choose {', '.join(get_args(Impl))}"
        )
    if impl == "eager" or (impl == "auto" and q.device.type != "cuda"):
        return "eager"
    if refusal := _triton_refuses(q, v):
        raise ConfigError(f'impl="{impl}" means the Triton kernels here, but {refusal}; use impl="eager"')
    return "triton"


def _triton_refuses(q: torch.Tensor, v: torch.Tensor) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors are on {q.device} and TRITON_INTERPRET=1 is not set"
    if q.dtype not in DTYPES:
        return (
            f"tensors are {q.dtype}, and they take {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    if q.shape[-1] not in HEAD_DIMS or v.shape[-1] != q.shape[-1]:
        return f"head dims are {q.shape[-1]} and {v.shape[-1]}, and they take equal ones of {', '.join(map(str, HEAD_DIMS))}"
    return None
