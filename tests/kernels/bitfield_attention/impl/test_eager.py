"""The eager path against the float64 definition: every hard case, forward and backward, and what must not change a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
import torch
from support.oracles.masks_oracle import ALL_BITS, KINDS, Token, dense_mask, random_words, words_of
from torch import Tensor

from mmcompile.kernels.bitfield_attention import bitfield_attention_reference
from mmcompile.kernels.bitfield_attention.impl import eager
from mmcompile.kernels.bitfield_attention.masks.block_plan import plan_blocks
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords

Words = tuple[Tensor, Tensor]
TEXT = Token(bits=3)
IMAGE = Token(causal=False, island=1, bits=2)
SCALE = 0.25
PADDING = Token(causal=False, document=0, bits=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Words and tensors of one call."""

    words: Words
    kv_words: Words | None = None
    heads: tuple[int, int] = (4, 2)
    dim: int = 8
    blocks: tuple[int, int] = (16, 8)
    window: int | None = None
    cap: int | Literal["auto"] | None = None
    dtype: torch.dtype = torch.float64
    spoil: Callable[[dict[str, Tensor]], None] = field(default=lambda tensors: None)
    """Changes tensors before the call."""

    @property
    def keys(self) -> Words:
        return self.words if self.kv_words is None else self.kv_words

    def tensors(self) -> dict[str, Tensor]:
        rows, tokens, kv_tokens = len(self.words[0]), self.words[0].shape[1], self.keys[0].shape[1]
        sizes = {"q": (self.heads[0], tokens), "k": (self.heads[1], kv_tokens), "v": (self.heads[1], kv_tokens)}
        sizes["dout"] = sizes["q"]
        made = {name: torch.randn(rows, *size, self.dim).to(self.dtype) for name, size in sizes.items()}
        made["dlse"] = torch.randn(rows, self.heads[0], tokens).to(self.dtype)
        self.spoil(made)
        return made

    def mask(self) -> Tensor:
        return dense_mask(*self.words, *self.keys, window=self.window)


def run(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of the eager path."""
    plan = plan_blocks(
        *case.words,
        *case.keys,
        window=case.window,
        block_q=case.blocks[0],
        block_kv=case.blocks[1],
        cap=case.cap,
    )
    call = MaskWords(*case.words, *case.keys, case.window), SCALE, plan
    q, k, v, dout, dlse = (tensors[name] for name in ("q", "k", "v", "dout", "dlse"))
    out, lse = eager.forward(q, k, v, *call)
    dq, dk, dv = eager.backward(dout, dlse, q, k, v, out, lse, *call)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def expected(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of the definition, in float64. What arrives at rows that see nothing goes nowhere."""
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    out, lse = bitfield_attention_reference(q, k, v, *case.words, *case.keys, scale=SCALE, window=case.window)
    some = lse.isfinite()
    dout, dlse = tensors["dout"].double(), tensors["dlse"].double()
    total = (out * dout)[some].sum() + (lse * dlse)[some].sum()
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *torch.autograd.grad(total, (q, k, v))), strict=True))


def check(case: Case) -> None:
    """Equality within 2e-6 of the norm in float32 (log-sum-exp: 1e-5 of 1 or its size), 1e-12 in float64.

    Backward starts from the rounded log-sum-exp, which bounds how well it can know weights where logits are large.
    """
    tensors = case.tensors()
    got, wanted = run(case, tensors), expected(case, tensors)
    empty = wanted["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty)
    close = 1e-12 if case.dtype == torch.float64 else 2e-6
    level = wanted["lse"].masked_fill(empty, 0)
    assert ((got["lse"].masked_fill(empty, 0) - level).abs() <= 5 * close * level.abs().clamp(min=1)).all()
    rounding = torch.finfo(case.dtype).eps * level.abs().max().item()
    for name in ("out", "dq", "dk", "dv"):
        x, result = wanted[name], got[name].double()
        allowed = close if name == "out" else max(close, rounding)
        assert result.isfinite().all(), name
        assert ((result - x).norm() <= allowed * x.norm()).item(), f"{name}: {(result - x).norm() / x.norm()}"
    assert not got["out"][empty].any() and not got["dq"][empty].any()


def causal(tokens: int) -> Words:
    return words_of([TEXT] * tokens)


def mixed(tokens: int = 100) -> Words:
    """Two documents of text and images, a hole of padding inside a tile, padding at the end."""
    second = [replace(token, document=2) for token in [TEXT] * 9 + [IMAGE] * 20 + [TEXT] * 9]
    row = [TEXT] * 10 + [IMAGE] * 21 + [TEXT] * 5 + [PADDING] * 2 + [TEXT] * 10 + second
    return words_of(row + [PADDING] * (tokens - len(row)))


def later(words: Words, first: int) -> Words:
    return words[0][:, first:], words[1][:, first:]


def infinite_where_unseen(words: Words) -> Callable[[dict[str, Tensor]], None]:
    """Fill keys and values that nothing sees with infinities and NaN, and queries and gradients of rows that see nothing."""
    seen = dense_mask(*words)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["v"][:, :, ~seen.any(1)[0]] = torch.inf
        tensors["k"][:, :, ~seen.any(1)[0]] = -torch.inf
        tensors["q"][:, :, ~seen.any(2)[0]] = torch.nan
        tensors["dout"][:, :, ~seen.any(2)[0]] = torch.inf

    return spoil


def strided(tensors: dict[str, Tensor]) -> None:
    """As projections make them, [B, T, H, D] transposed; and every other value of a wider tensor."""
    for name in ("q", "k", "dout"):
        tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    tensors["v"] = tensors["v"].repeat_interleave(2, dim=-1)[..., ::2]


def large_logits(tensors: dict[str, Tensor]) -> None:
    """Whole numbers, whose products float32 holds exactly: what is compared is the softmax, not the rounding of its logits."""
    tensors["q"].round_().mul_(1e4)
    tensors["k"].round_()


def scaled(name: str, factor: float, tokens: slice = slice(None)) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][:, :, tokens] *= factor

    return spoil


LAST_ID = replace(TEXT, document=(1 << 15) - 1, island=(1 << 16) - 1, bits=ALL_BITS)
ONE_KEY = words_of([replace(TEXT, bits=2)] * 60 + [replace(TEXT, bits=1)] + [TEXT] * 3)
LONE_ROW = (ONE_KEY[0][:, -1:] & ~2, ONE_KEY[1][:, -1:])

HARD = {
    "all rows empty": Case(words=words_of([PADDING] * 40)),
    "one row empty inside a mixed tile": Case(words=words_of([TEXT] * 5 + [PADDING] + [TEXT] * 30)),
    "first tile fully masked for some rows": Case(words=words_of([IMAGE] * 12 + [replace(IMAGE, island=2)] * 30)),
    "only visible key in the last range": Case(words=LONE_ROW, kv_words=ONE_KEY),
    "one token": Case(words=causal(1)),
    "one token of padding": Case(words=words_of([PADDING])),
    "length no multiple of a block": Case(words=causal(77)),
    "blocks of queries longer than of keys": Case(words=mixed(), blocks=(32, 8)),
    "blocks of queries shorter than of keys": Case(words=mixed(), blocks=(8, 32)),
    "last document and island": Case(words=words_of([LAST_ID] * 20 + [replace(LAST_ID, island=0)] * 20 + [TEXT] * 20)),
    "last ids beside the sign": Case(words=words_of([replace(LAST_ID, causal=False)] * 20 + [LAST_ID] * 20)),
    "each of 32 modality bits": Case(
        words=words_of([replace(TEXT, bits=1 << bit) for bit in range(32)] + [LAST_ID] * 9)
    ),
    "all modality bits": Case(words=words_of([replace(TEXT, bits=ALL_BITS)] * 40)),
    "causal without modality sees its island": Case(
        words=words_of([TEXT] * 9 + [Token(island=4, bits=0)] * 20 + [TEXT] * 9)
    ),
    "causal without modality or island": Case(words=words_of([TEXT] * 9 + [Token(bits=0)] * 20 + [TEXT] * 9)),
    "logits of 1e4": Case(words=mixed(), spoil=large_logits),
    "infinite where nothing sees": Case(words=mixed(), spoil=infinite_where_unseen(mixed())),
    "huge gradient on padded rows": Case(words=mixed(), spoil=scaled("dout", 1e30, slice(86, None))),
    "more keys than queries": Case(words=later(mixed(), 70), kv_words=mixed()),
    "more queries than keys": Case(words=mixed(), kv_words=later(mixed(), 70)),
    "one query head a key head": Case(words=mixed(), heads=(4, 4)),
    "four query heads a key head": Case(words=mixed(), heads=(8, 2)),
    "eight query heads a key head": Case(words=mixed(), heads=(8, 1)),
    "head dim 64": Case(words=mixed(), dim=64),
    "head dim 96": Case(words=mixed(), dim=96),
    "head dim 128": Case(words=mixed(), dim=128),
    "head dim 256": Case(words=mixed(), dim=256),
    "strides of projections and slices": Case(words=mixed(), spoil=strided),
    "window": Case(words=mixed(), window=7),
    "window of one token": Case(words=mixed(), window=1),
    "window longer than all": Case(words=mixed(), window=1000),
    "several rows in one chunk": Case(words=(mixed()[0].repeat(3, 1), mixed()[1].repeat(3, 1)), blocks=(128, 128)),
    "blocks of 128": Case(words=mixed(300), blocks=(128, 128)),
}


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("case", HARD.values(), ids=HARD.keys())
def test_hard_case(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(replace(case, dtype=dtype))
    # One tile at a time, every row goes through the running maximum.
    monkeypatch.setattr(eager, "MAX_SCORES", 1)
    check(replace(case, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_random_masks(kind: str) -> None:
    for seed in range(4):
        check(
            Case(
                words=random_words(seed, 150, kind), window=(None, 20)[seed % 2], blocks=((16, 8), (32, 64))[seed // 2]
            )
        )


def test_offsets_beyond_32_bits() -> None:
    """Heads lie 2^30 elements apart; of four GiB of addresses a few pages are touched."""
    tokens, apart = 40, 1 << 30
    memory = torch.empty(2 * apart + 3 * tokens * 8, dtype=torch.float16)
    near = [torch.randn(1, 3, tokens, 8).half() for _ in range(3)]
    far = [memory.as_strided(x.shape, (0, apart, 8, 1), n * tokens * 8) for n, x in enumerate(near)]
    for place, x in zip(far, near, strict=True):
        place.copy_(x)
    words = causal(tokens)
    call = MaskWords(*words, *words), SCALE, plan_blocks(*words, block_q=16, block_kv=8)
    out, lse = eager.forward(near[0], near[1], near[2], *call)
    assert torch.equal(eager.forward(far[0], far[1], far[2], *call)[0], out)
    grads = [eager.backward(out, None, q, k, v, out, lse, *call) for q, k, v in (near, far)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_rounds_inputs_and_outputs_only(dtype: torch.dtype) -> None:
    case = Case(words=mixed(), dtype=dtype)
    tensors = case.tensors()
    got, wanted = run(case, tensors), expected(case, tensors)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        assert ((got[name].double() - wanted[name]).norm() <= 4e-3 * wanted[name].norm()).item(), name
    assert got["lse"].dtype == torch.float32


def test_gradients_in_a_wider_dtype() -> None:
    case = Case(words=mixed(), dtype=torch.bfloat16)
    plan = plan_blocks(*case.words)
    q, k, v, dout, _ = case.tensors().values()
    call = MaskWords(*case.words, *case.keys), SCALE, plan
    out, lse = eager.forward(q, k, v, *call)
    wide = eager.backward(dout, None, q, k, v, out, lse, *call, torch.float32)
    narrow = eager.backward(dout, None, q, k, v, out, lse, *call)
    assert all(x.dtype == torch.float32 for x in wide)
    assert all(torch.equal(x.bfloat16(), y) for x, y in zip(wide, narrow, strict=True))


def test_one_wrong_bit_would_show_on_200_random_masks() -> None:
    """Queries and keys of zero give the uniform mean over visible keys; values are one-hot, so the mean is the mask."""
    for seed in range(200):
        words = random_words(seed, 96, KINDS[seed % len(KINDS)])
        window = (None, 13)[seed % 3 == 2]
        seen = dense_mask(*words, window=window)[0].double()
        q, v = torch.zeros(1, 1, 96, 8, dtype=torch.float64), torch.eye(96, dtype=torch.float64)[None, None]
        plan = plan_blocks(*words, window=window, block_q=16, block_kv=8)
        out, lse = eager.forward(q, q, v, MaskWords(*words, *words, window), 1.0, plan)
        counts = seen.sum(1, keepdim=True)
        torch.testing.assert_close(out[0, 0] * counts, seen, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[0, 0].exp(), counts[:, 0], rtol=1e-12, atol=0)


def test_permuting_tokens_permutes_results() -> None:
    case = Case(words=mixed())
    tensors, order = case.tensors(), torch.randperm(100)
    moved = {name: x[:, :, order] for name, x in tensors.items()}
    got = run(replace(case, words=(case.words[0][:, order], case.words[1][:, order])), moved)
    for name, x in run(case, tensors).items():
        torch.testing.assert_close(got[name], x[:, :, order])


def test_padding_changes_nothing() -> None:
    case = Case(words=mixed(86))
    tensors = case.tensors()
    padded = {name: torch.cat([x, torch.randn_like(x[:, :, :40])], 2) for name, x in tensors.items()}
    got = run(replace(case, words=mixed(126)), padded)
    for name, x in run(case, tensors).items():
        torch.testing.assert_close(got[name][:, :, :86], x, rtol=1e-12, atol=1e-12)
        assert name == "lse" or not got[name][:, :, 86:].any()


def test_documents_packed_are_documents_alone() -> None:
    case = Case(words=words_of([replace(TEXT, document=n) for n, length in ((1, 37), (2, 50)) for _ in range(length)]))
    tensors = case.tensors()
    together = run(case, tensors)
    for part in (slice(0, 37), slice(37, None)):
        alone = replace(case, words=(case.words[0][:, part], case.words[1][:, part]))
        for name, x in run(alone, {name: x[:, :, part] for name, x in tensors.items()}).items():
            torch.testing.assert_close(together[name][:, :, part], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", (1, 3, "auto"))
def test_splitting_work_changes_nothing(cap: int | Literal["auto"]) -> None:
    case = Case(words=mixed())
    tensors = case.tensors()
    whole = run(case, tensors)
    assert all(torch.equal(x, whole[name]) for name, x in run(replace(case, cap=cap), tensors).items())


def test_results_repeat_bit_by_bit() -> None:
    case = Case(words=mixed(), dtype=torch.float32)
    tensors = case.tensors()
    first = run(case, tensors)
    assert all(torch.equal(x, first[name]) for name, x in run(case, tensors).items())


def test_a_row_that_sees_infinity_does_not_spread_it() -> None:
    """A value may be infinite where it is seen: rows that see it say so, the others are what they were."""
    case = Case(words=causal(40), dtype=torch.float32)
    tensors = case.tensors()
    clean = run(case, tensors)
    tensors["v"][:, :, 30] = torch.inf
    out = run(case, tensors)["out"]
    assert not out[:, :, 30:].isfinite().any()
    torch.testing.assert_close(out[:, :, :30], clean["out"][:, :, :30])
