"""Tile sizes of the Triton kernels, one row per kernel, head dim and element size.

Chosen so that a compiled kernel spills no registers (in float32, next to none) and fits 227 KiB of shared memory on an
H100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kernel = Literal["forward", "query_gradients", "key_gradients"]

HEAD_DIMS = (64, 96, 128, 256)
"""Head dims that the kernels support; 96 is computed as 128 with zeros."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Element types that the kernels support."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Compile options of one Triton kernel. The tile sizes divide the block sizes of the plan."""

    block_m: int
    """Number of queries in a tile."""
    block_n: int
    """Number of keys in a tile."""
    block_g: int
    """Keys per sub-tile of a GENERAL tile (queries, in the kernel `key_gradients`): fewer than a tile, to save registers."""
    num_warps: int
    num_stages: int
    """Number of tiles in flight: loads run this many tiles ahead."""
    passes: int = 1
    """Number of passes of `key_gradients`; 2 computes dK and dV one after the other, where registers do not hold both."""


def block_d(head_dim: int) -> int:
    """Return the number of columns of a tile for a head dim: the next power of two, as Triton requires."""
    return 1 << (head_dim - 1).bit_length()


def config(kernel: Kernel, head_dim: int, dtype: torch.dtype) -> Config:
    """Return the shipped configuration of a kernel, for a head dim of `HEAD_DIMS` and a dtype of `DTYPES`."""
    return _TABLE[kernel, block_d(head_dim), dtype.itemsize]


def precision() -> str:
    """Return Triton's precision for float32 products: three TF32 products if torch is set to "highest", else one."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _row(block_m: int, block_n: int, block_g: int, num_warps: int, num_stages: int, passes: int = 1) -> Config:
    return Config(
        block_m=block_m, block_n=block_n, block_g=block_g, num_warps=num_warps, num_stages=num_stages, passes=passes
    )


# Kernel, head dim, bytes of an element. Two-byte rows of head dims 64 and 128: the fastest of `gpu_attention.py --tune`
# on an H200. Backward in float32 has 4 warps for 64 rows: with 8 warps three TF32 products fault on it (Triton 3.6),
# and those that work spill a little there. Float32 with a head dim of 256 does not fit at all.
_TABLE: dict[tuple[Kernel, int, int], Config] = {
    ("forward", 64, 2): _row(128, 64, 32, 4, 3),
    ("forward", 128, 2): _row(128, 64, 64, 8, 4),
    ("forward", 256, 2): _row(128, 64, 16, 8, 2),
    ("forward", 64, 4): _row(128, 64, 32, 8, 2),
    ("forward", 128, 4): _row(128, 32, 32, 8, 2),
    ("query_gradients", 64, 2): _row(64, 64, 32, 4, 3),
    ("query_gradients", 128, 2): _row(128, 64, 32, 8, 3),
    ("query_gradients", 256, 2): _row(64, 32, 16, 8, 3),
    ("query_gradients", 64, 4): _row(128, 32, 32, 8, 2),
    ("query_gradients", 128, 4): _row(64, 32, 32, 4, 1),
    ("key_gradients", 64, 2): _row(64, 64, 64, 4, 3),
    ("key_gradients", 128, 2): _row(32, 128, 16, 8, 3),
    ("key_gradients", 256, 2): _row(32, 64, 16, 8, 2, passes=2),
    ("key_gradients", 64, 4): _row(32, 64, 16, 4, 1),
    ("key_gradients", 128, 4): _row(32, 64, 16, 4, 1, passes=2),
}
