"""Communication of context-parallel attention: gathers of key/value heads, and sums of their gradients.

A message holds a few heads of one rank's tokens, K and V of a token side by side: [local tokens, B, heads, D + Dv].
So the messages of all P ranks, one after the other, need no copy to be read as keys [B, heads, P * local tokens, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import final

import torch

from mmcompile.kernels.process_groups import Channel, Transfer

_SUM_BUFFERS = 3
"""Number of buffers for gradients to be summed: one being written, and two that may still be in transfer."""


def gathered_heads(
    channel: Channel, k: torch.Tensor, v: torch.Tensor, head_stride: int, num_ranks: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Gather key/value heads of all ranks, a few at a time, while the caller computes with those gathered before.

    Args:
        k: [B, Hkv, T, D], keys of this rank. v: [B, Hkv, T, Dv], values of this rank.
        head_stride: number of heads gathered at a time, at least 1; the last gather may have fewer.

    Yields:
        (slice of heads, their keys [B, heads, P * T, D] and their values [B, heads, P * T, Dv]) of all P ranks: views of a
        buffer that is overwritten once the caller asks for the heads after the next.
    """
    parts = [slice(first, min(first + head_stride, k.shape[1])) for first in range(0, k.shape[1], head_stride)]
    space = [k.new_empty(_message_size(k, v, head_stride) * num_ranks) for _ in parts[:2]]

    def start(index: int) -> Transfer:
        message = _packed(k[:, parts[index]], v[:, parts[index]], k.dtype)
        shape = num_ranks * message.shape[0], *message.shape[1:]
        return channel.gather(_view(space[index % 2], shape), message)

    coming = start(0)
    for index, heads in enumerate(parts):
        ready = coming.wait()
        if index + 1 < len(parts):
            coming = start(index + 1)
        yield heads, *_unpacked(ready, k.shape[-1])


@final
class KeySums:
    """Sums the gradients of keys and values over ranks, in `dtype`, while the caller computes the gradients of the next heads."""

    def __init__(
        self, channel: Channel, k: torch.Tensor, v: torch.Tensor, head_stride: int, num_ranks: int, dtype: torch.dtype
    ) -> None:
        self._channel, self._k, self._v, self._dtype = channel, k, v, dtype
        self._size = _message_size(k, v, head_stride) * num_ranks
        self._space: list[torch.Tensor] = []
        self._started: list[tuple[slice, Transfer]] = []

    def add(self, heads: slice, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Start to send the gradients of a few heads to the ranks that hold the keys' tokens.

        Args:
            heads: slice of the heads.
            dk, dv: [B, heads, P * T, D] and [B, heads, P * T, Dv], for the keys and values of all ranks.
        """
        turn = len(self._started)
        if turn < _SUM_BUFFERS:
            self._space.append(self._k.new_empty(self._size, dtype=self._dtype))
        else:
            self._started[turn - _SUM_BUFFERS][1].wait()
        message = _packed(dk, dv, self._dtype, self._space[turn % _SUM_BUFFERS])
        target = message.new_empty(self._k.shape[2], *message.shape[1:])
        self._started.append((heads, self._channel.scatter_sum(target, message)))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for all sums, and return the gradients of this rank's keys and values, in their shapes and dtypes."""
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self._k, self._v))
        for heads, transfer in self._started:
            dk[:, heads], dv[:, heads] = _unpacked(transfer.wait(), self._k.shape[-1])
        return dk, dv


def _message_size(k: torch.Tensor, v: torch.Tensor, heads: int) -> int:
    return k.shape[0] * heads * k.shape[2] * (k.shape[-1] + v.shape[-1])


def _packed(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, space: torch.Tensor | None = None) -> torch.Tensor:
    """Return keys [B, heads, T, D] and values [B, heads, T, Dv] as one message [T, B, heads, D + Dv], in `space` if given."""
    shape = k.shape[2], *k.shape[:2], k.shape[-1] + v.shape[-1]
    message = k.new_empty(shape, dtype=dtype) if space is None else _view(space, shape)
    message[..., : k.shape[-1]] = k.permute(2, 0, 1, 3)
    message[..., k.shape[-1] :] = v.permute(2, 0, 1, 3)
    return message


def _unpacked(message: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (keys [B, heads, T, D], values [B, heads, T, Dv]) as views of a message [T, B, heads, D + Dv]; D is `dim`."""
    heads = message.permute(1, 2, 0, 3)
    return heads[..., :dim], heads[..., dim:]


def _view(space: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return space[: prod(shape)].view(shape)
