"""Packed attention against its float64 definition: values, gradients, fakes, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from support.oracles.packed_attention_oracle import packed_attention_reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mmcompile.kernels.packed_attention import packed_attention

LENGTHS = {
    "one segment": (7,),
    "equal": (4, 4, 4),
    "odd": (1, 3, 5, 2, 3),
    "empty between": (0, 3, 0, 0, 4, 0),
    "single tokens": (1, 1, 1),
}
HEADS = [(4, 4), (4, 2), (6, 1)]
SCALE = 0.37


def _inputs(
    lengths: Sequence[int], heads: tuple[int, int], dtype: torch.dtype = torch.float64, dim: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = sum(lengths)
    query, key, value = (torch.randn(1, count, tokens, dim, dtype=dtype) for count in (heads[0], heads[1], heads[1]))
    return query, key, value, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_values_and_gradients_equal_the_definition(lengths: Sequence[int], heads: tuple[int, int]) -> None:
    *tensors, bounds = _inputs(lengths, heads)
    outcomes = []
    for attention in (packed_attention, packed_attention_reference):
        query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
        out = attention(query, key, value, bounds, SCALE)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        outcomes.append((out, *torch.autograd.grad((out * weights).sum(), (query, key, value))))
    for got, wanted in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_the_reference_is_attention_of_each_segment_alone() -> None:
    lengths = (3, 5, 2)
    query, key, value, bounds = _inputs(lengths, (4, 2))
    parts = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True))
    torch.testing.assert_close(packed_attention_reference(query, key, value, bounds, SCALE), torch.cat(parts, 2))


def test_segments_do_not_see_each_other() -> None:
    query, key, value, bounds = _inputs((3, 4), (2, 2))
    before = packed_attention(query, key, value, bounds, SCALE)
    key[:, :, 3:], value[:, :, 3:] = 100.0, -100.0
    after = packed_attention(query, key, value, bounds, SCALE)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.equal(before[:, :, 3:], after[:, :, 3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_as_close_as_its_rounding(dtype: torch.dtype) -> None:
    """Outputs are weighted means of values and gradients sums of a few products: some units in the last place."""
    *tensors, bounds = _inputs((1, 3, 5, 2, 3), (4, 2), dtype)
    low = [tensor.requires_grad_() for tensor in tensors]
    query, key, value = wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    got = packed_attention(*low, bounds, SCALE)
    wanted = packed_attention_reference(query, key, value, bounds, SCALE)
    assert got.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    weights = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(wanted).to(dtype)
    pairs = [(got, wanted)]
    pairs += list(
        zip(
            torch.autograd.grad((got * weights).sum(), low),
            torch.autograd.grad((wanted * weights.double()).sum(), wide),
            strict=True,
        )
    )
    for have, want in pairs:
        assert have.dtype == dtype
        error = float((have.double() - want).detach().abs().max() / want.detach().abs().max())
        assert error < tolerance, f"{error:.1e} of the largest entry, {tolerance:.1e} allowed"


def test_layouts_other_than_contiguous_are_read_right() -> None:
    """Towers hand over transposed views."""
    query, key, value, bounds = _inputs((3, 4), (4, 4))
    views = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    assert not views[0].is_contiguous()
    got = packed_attention(*views, bounds, SCALE)
    assert got.is_contiguous()
    assert torch.equal(got, packed_attention(query, key, value, bounds, SCALE))


def test_gradcheck() -> None:
    *tensors, bounds = _inputs((2, 0, 3, 2), (2, 1), dim=3)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(lambda q, k, v: packed_attention(q, k, v, bounds, SCALE), leaves)


@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_it_is_a_well_formed_op(heads: tuple[int, int]) -> None:
    """Schema, fake implementation and autograd registration agree with what it does."""
    *tensors, bounds = _inputs((3, 1, 4), heads)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.mmcompile.packed_attention.default, (*leaves, bounds, SCALE), test_utils=tests)
    detached = [tensor.detach() for tensor in leaves]
    backward = torch.ops.mmcompile.packed_attention_backward.default
    torch.library.opcheck(backward, (torch.randn_like(detached[0]), *detached, bounds, SCALE), test_utils=tests)


def test_fakes_need_no_values() -> None:
    with FakeTensorMode() as mode:
        query, key, value, bounds = (mode.from_tensor(x) for x in _inputs((3, 4), (4, 2), torch.bfloat16))
        out = packed_attention(query, key, value, bounds, SCALE)
    assert (tuple(out.shape), out.dtype) == ((1, 4, 7, 8), torch.bfloat16)


def test_every_position_is_written() -> None:
    """The output starts as uninitialised memory."""
    query, key, value, bounds = _inputs((2, 5, 1), (2, 2))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(1).isnan()
        out = packed_attention(query, key, value, bounds, SCALE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not out.isnan().any()
