"""The reference against sums over visible keys written out query by query, its gradients, and rows that see nothing."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.masks_oracle import KINDS, dense_mask, random_words
from torch import Tensor

from mmcompile.kernels.bitfield_attention.impl.dense_reference import bitfield_attention_reference, reference_mask

HEADS = ((2, 2), (4, 2), (4, 1))


def inputs(heads: tuple[int, int], tokens: int, kv_tokens: int | None = None, dim: int = 4) -> list[Tensor]:
    kv_tokens = tokens if kv_tokens is None else kv_tokens
    shapes = ((heads[0], tokens), (heads[1], kv_tokens), (heads[1], kv_tokens))
    return [torch.randn(1, count, length, dim, dtype=torch.float64) for count, length in shapes]


def query_by_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for token in range(q.shape[2]):
            seen = mask[0, token].nonzero()[:, 0]
            if len(seen):
                scores = k[0, head // group, seen] @ q[0, head, token] * scale
                out[0, head, token] = scores.softmax(0) @ v[0, head // group, seen]
                lse[0, head, token] = scores.logsumexp(0)
    return out, lse


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_sums_over_visible_keys(kind: str, heads: tuple[int, int]) -> None:
    words, positions = random_words(1, 40, kind)
    q, k, v = inputs(heads, 40)
    got = bitfield_attention_reference(q, k, v, words, positions, scale=0.3, window=11)
    torch.testing.assert_close(got, query_by_query(q, k, v, dense_mask(words, positions, window=11), 0.3))


def test_keys_may_be_others_than_the_queries() -> None:
    words, positions = random_words(3, 40, "MP-Gemma")
    kv_words, kv_positions = words[:, ::2], positions[:, ::2]
    q, k, v = inputs((2, 1), 40, 20)
    got = bitfield_attention_reference(q, k, v, words, positions, kv_words, kv_positions)
    mask = dense_mask(words, positions, kv_words, kv_positions)
    torch.testing.assert_close(got, query_by_query(q, k, v, mask, 0.5))


@pytest.mark.parametrize("window", (None, 1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_mask_equals_that_on_bit_strings(kind: str, window: int | None) -> None:
    for seed in range(5):
        words, positions = random_words(seed, 120, kind)
        got = reference_mask(words, positions, words, positions, window)
        assert torch.equal(got, dense_mask(words, positions, window=window))


def test_gradients_are_those_of_finite_differences() -> None:
    words, positions = random_words(2, 9, "padded")
    tensors = [x.requires_grad_() for x in inputs((2, 1), 9, dim=2)]
    empty = ~dense_mask(words, positions)[0].any(-1)

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = bitfield_attention_reference(q, k, v, words, positions)
        return out, lse[..., ~empty]

    assert empty.any() and torch.autograd.gradcheck(outputs, tensors)


@pytest.mark.parametrize("junk", (1e30, math.inf, math.nan))
def test_what_no_pair_uses_has_exactly_no_effect(junk: float) -> None:
    """Padding may hold anything: results are 0 and -inf, gradients 0, and no nan reaches the rest."""
    words, positions = random_words(2, 60, "EE")
    words[:, 40:50] = 0
    clean = inputs((2, 1), 60)
    dirty = [x.clone() for x in clean]
    for x in dirty:
        x[:, :, 40:50] = junk
    results = []
    for tensors in (clean, dirty):
        q, k, v = (x.requires_grad_() for x in tensors)
        out, lse = bitfield_attention_reference(q, k, v, words, positions)
        seen = dense_mask(words, positions)[0].any(-1)
        (out.sum() + lse[..., seen].square().sum()).backward()
        assert (out[:, :, 40:50] == 0).all() and (lse[:, :, 40:50] == -math.inf).all()
        for x in (q, k, v):
            assert x.grad is not None and (x.grad[:, :, 40:50] == 0).all()
        results.append((out, lse, q.grad, k.grad, v.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_all_rows_empty() -> None:
    q, k, v = (x.requires_grad_() for x in inputs((2, 2), 5))
    out, lse = bitfield_attention_reference(q, k, v, torch.zeros(1, 5, dtype=torch.int64))
    out.sum().backward()
    assert (out == 0).all() and (lse == -math.inf).all()
    assert all((x.grad == 0).all() for x in (q, k, v) if x.grad is not None)
