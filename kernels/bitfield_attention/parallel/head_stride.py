"""Number of key/value heads to gather at a time: with few, attention hides the gathers; with many, it fills the device.

For n steps of s heads on P ranks, with c(s) the time of attention and g(s), r(s) those of gathering K and V and of
adding up their gradients:

    forward     g + (n - 1) max(g, c) + c
    backward    g + (n - 1) max(g + r, c') + c' + r        c' = 2.5 c; the link does one thing at a time

    g(s) = latency + B (P - 1) T s (D + Dv) bytes per element / bandwidth    r(s): the same with 4 bytes
    c(s) = seconds per tile * least over caps of (tiles / programs + longest item)

B is the batch size, T a rank's tokens, D and Dv the head dims of K and V. A kernel computes `programs` work items (lists of
tiles) at a time, each of at most `cap` tiles. 2.5: backward has 5 matrix products where forward has 2.

With many heads, attention hides the gathers of a 16-bit forward if a query sees at least P F / (G BW) keys on average:
F FLOP/s, BW bytes/s, G query heads per key head.

Source: `launch_order` for the cost of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention.masks.launch_order import CAPS, ITEM_COST, PARTIAL_COST

_BACKWARD = 2.5
_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRates:
    """Measured rates of a device and its link, which are below the nominal ones."""

    flops_per_s: float
    """FLOP/s of attention in tiles without a mask."""
    bytes_per_s: float
    """Bytes/s that one rank receives while all ranks gather."""
    latency_s: float
    """Seconds that one collective takes without the transfer of its bytes."""
    programs: int = 264
    """Number of work items in flight: two per multiprocessor of an H100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAttention:
    """Sizes of one call of context-parallel attention on the rank with the most work."""

    num_ranks: int
    batch: int
    local_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tiles: Sequence[int]
    """Number of tiles that each block of the rank's queries visits, over the batch."""
    block: int = 128
    """Number of tokens along each dim of a tile."""
    element_bytes: int = 2


def choose_head_stride(call: RankAttention, rates: AttentionRates) -> int:
    """Return the head stride with the least time of forward and backward, by the model of this module; the smaller of equals.

    Only strides that divide the key/value heads are tried: the communication of a smaller last step would not be hidden.
    """
    strides = [stride for stride in range(1, call.num_kv_heads + 1) if call.num_kv_heads % stride == 0]
    return min(strides, key=lambda stride: (attention_s(call, rates, stride), stride))


def attention_s(call: RankAttention, rates: AttentionRates, head_stride: int) -> float:
    """Return the seconds of forward and backward, with communication that attention does not hide.

    Raises:
        ConfigError: the stride does not divide the key/value heads.
    """
    if head_stride < 1 or call.num_kv_heads % head_stride:
        raise ConfigError(f"head_stride {head_stride} does not divide the {call.num_kv_heads} key/value heads")
    steps = call.num_kv_heads // head_stride
    compute = _compute_s(call, rates, head_stride)
    if call.num_ranks == 1:
        return (1 + _BACKWARD) * steps * compute
    elements = call.batch * (call.num_ranks - 1) * call.local_tokens * head_stride * 2 * call.head_dim
    gather, add = (rates.latency_s + elements * size / rates.bytes_per_s for size in (call.element_bytes, _SUM_BYTES))
    forward = gather + (steps - 1) * max(gather, compute) + compute
    compute *= _BACKWARD
    return forward + gather + (steps - 1) * max(gather + add, compute) + compute + add


def _compute_s(call: RankAttention, rates: AttentionRates, head_stride: int) -> float:
    heads = head_stride * call.num_heads // call.num_kv_heads
    tile_s = 4 * call.block**2 * call.head_dim * rates.programs / rates.flops_per_s
    tiles = np.asarray(call.tiles, dtype=np.float64)
    return tile_s * min(_span(tiles, cap, heads, rates.programs) for cap in (*CAPS, np.inf))


def _span(tiles: np.ndarray, cap: float, heads: int, programs: int) -> float:
    """Return a kernel launch's time in units of one tile's: work items have up to `cap` tiles, `programs` items run at a time."""
    pieces = np.maximum(1, np.ceil(tiles / cap))
    items = tiles / pieces + ITEM_COST + PARTIAL_COST * (pieces > 1)
    return float(heads * (pieces * items).sum() / programs + items.max(initial=0) * (1 - 1 / programs))
