"""The Triton kernels against the float64 definition, interpreted where there is no GPU: every hard case, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.oracles.masks_oracle import ALL_BITS, KINDS, Token, dense_mask, random_words, words_of
from torch import Tensor

from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention import bitfield_attention_reference
from mmcompile.kernels.bitfield_attention.impl import triton_launch as triton
from mmcompile.kernels.bitfield_attention.impl.triton_configs import Config
from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan, plan_blocks
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 2e-6 if DEVICE == "cpu" else 1e-5
SCALE = 0.25
# NumPy warns of infinities and NaN that the kernels mask afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
NAMES = "out", "lse", "dq", "dk", "dv"

Words = tuple[Tensor, Tensor]
TEXT = Token(bits=3)
IMAGE = Token(causal=False, island=1, bits=2)
PADDING = Token(causal=False, document=0, bits=0)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that torch hands out holds NaN, so that an element no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def on_device(words: Words) -> Words:
    return words[0].to(DEVICE), words[1].to(DEVICE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Words and tensors of one call."""

    words: Words
    kv_words: Words | None = None
    heads: tuple[int, int] = (2, 1)
    dim: int = 64
    blocks: tuple[int, int] = (32, 32)
    tiles: Config | None = None
    """Of all three kernels; None for the shipped ones."""
    window: int | None = None
    cap: int | None = None
    dtype: torch.dtype = torch.float32
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
        made["dlse"] = torch.randn(rows, self.heads[0], tokens)
        self.spoil(made)
        return made

    def plan(self) -> BlockPlan:
        block_q, block_kv = self.blocks
        words = *on_device(self.words), *on_device(self.keys)
        return plan_blocks(*words, window=self.window, block_q=block_q, block_kv=block_kv, cap=self.cap)


def run(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of the kernels."""
    call = MaskWords(*on_device(case.words), *on_device(case.keys), case.window), SCALE, case.plan()
    q, k, v, dout, dlse = (tensors[name].to(DEVICE) for name in ("q", "k", "v", "dout", "dlse"))
    out, lse = triton.forward(q, k, v, *call, tiles=case.tiles)
    grads = triton.backward(dout, dlse, q, k, v, out, lse, *call, query_tiles=case.tiles, key_tiles=case.tiles)
    return dict(zip(NAMES, (x.cpu() for x in (out, lse, *grads)), strict=True))


def expected(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of the definition, in float64. What arrives at rows that see nothing goes nowhere."""
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    out, lse = bitfield_attention_reference(q, k, v, *case.words, *case.keys, scale=SCALE, window=case.window)
    some = lse.isfinite()
    total = (out * tensors["dout"].double())[some].sum() + (lse * tensors["dlse"].double())[some].sum()
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(total, (q, k, v))), strict=True))


def check(case: Case, close: float = CLOSE) -> None:
    """Equality within `close` of the norm (log-sum-exp: 1e-5 of 1 or its size); zeros where a row sees nothing.

    Backward starts from the rounded log-sum-exp, which bounds how well it can know weights where logits are large.
    """
    tensors = case.tensors()
    got, wanted = run(case, tensors), expected(case, tensors)
    empty = wanted["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty)
    level = wanted["lse"].masked_fill(empty, 0)
    assert ((got["lse"].masked_fill(empty, 0) - level).abs() <= 1e-5 * level.abs().clamp(min=1)).all()
    rounding = torch.finfo(torch.float32).eps * level.abs().max().item()
    for name in ("out", "dq", "dk", "dv"):
        result, allowed = got[name].double(), close if name == "out" else max(close, rounding)
        assert result.isfinite().all(), name
        error, size = (result - wanted[name]).norm(), wanted[name].norm()
        assert (error <= allowed * size).item(), f"{name}: {error / size}"
    assert not got["out"][empty].any() and not got["dq"][empty].any()


def causal(tokens: int) -> Words:
    return words_of([TEXT] * tokens)


def mixed(tokens: int = 170) -> Words:
    """Two documents of text and images, a hole of padding inside a tile, padding at the end: tiles of every class."""
    second = [replace(token, document=2) for token in [TEXT] * 9 + [IMAGE] * 20 + [TEXT] * 19]
    row = [TEXT] * 64 + [IMAGE] * 20 + [TEXT] * 12 + [PADDING] * 2 + [TEXT] * 10 + second
    return words_of(row + [PADDING] * (tokens - len(row)))


def later(words: Words, first: int) -> Words:
    return words[0][:, first:], words[1][:, first:]


def infinite_padding(words: Words) -> Callable[[dict[str, Tensor]], None]:
    """Fill tokens of padding with infinities and NaN."""
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


def unaligned(tensors: dict[str, Tensor]) -> None:
    """Rows that do not begin at multiples of 16 bytes."""
    for name in ("q", "k", "v", "dout"):
        x = tensors[name]
        tensors[name] = torch.cat([x[..., :1], x, x[..., :2]], -1)[..., 1:-2]


def one_token_strides(tensors: dict[str, Tensor]) -> None:
    """Strides of dims of size 1 say nothing."""
    for name in ("q", "k", "v"):
        tensors[name] = tensors[name].as_strided(tensors[name].shape, (1, 3, 7, 1))


def large_logits(tensors: dict[str, Tensor]) -> None:
    """Whole numbers, whose products float32 holds exactly: what is compared is the softmax, not the rounding of its logits."""
    tensors["q"].round_().mul_(1e4)
    tensors["k"].round_()


def scaled(name: str, factor: float, tokens: slice = slice(None)) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][:, :, tokens] *= factor

    return spoil


def tiles(block_m: int, block_n: int, block_g: int, passes: int = 1) -> Config:
    return Config(block_m=block_m, block_n=block_n, block_g=block_g, num_warps=4, num_stages=2, passes=passes)


LAST_ID = replace(TEXT, document=(1 << 15) - 1, island=(1 << 16) - 1, bits=ALL_BITS)
ONE_KEY = words_of([replace(TEXT, bits=2)] * 100 + [replace(TEXT, bits=1)] + [TEXT] * 3)
LONE_ROW = (ONE_KEY[0][:, -1:] & ~2, ONE_KEY[1][:, -1:])
BATCH = (mixed()[0].repeat(3, 1), mixed()[1].repeat(3, 1))

HARD = {
    "all rows empty": Case(words=words_of([PADDING] * 40)),
    "one row empty inside a mixed tile": Case(words=words_of([TEXT] * 5 + [PADDING] + [TEXT] * 30)),
    "first tile fully masked for some rows": Case(words=words_of([IMAGE] * 40 + [replace(IMAGE, island=2)] * 30)),
    "only visible key in the last split": Case(words=LONE_ROW, kv_words=ONE_KEY, cap=1),
    "one token": Case(words=causal(1)),
    "one token, strides without meaning": Case(words=causal(1), heads=(1, 1), spoil=one_token_strides),
    "one token of padding": Case(words=words_of([PADDING])),
    "length no multiple of a block": Case(words=causal(77)),
    "blocks of queries longer than of keys": Case(words=mixed(), blocks=(64, 16)),
    "blocks of queries shorter than of keys": Case(words=mixed(), blocks=(16, 64)),
    "tiles smaller than blocks": Case(words=mixed(), blocks=(64, 64), tiles=tiles(32, 16, 16)),
    "wide GENERAL tiles": Case(words=mixed(), blocks=(64, 64), tiles=tiles(16, 32, 64)),
    "dK and dV one after the other": Case(words=mixed(), tiles=tiles(32, 32, 32, passes=2)),
    "last document and island": Case(words=words_of([LAST_ID] * 20 + [replace(LAST_ID, island=0)] * 20 + [TEXT] * 20)),
    "last ids beside the sign": Case(words=words_of([replace(LAST_ID, causal=False)] * 20 + [LAST_ID] * 20)),
    "each of 32 modality bits": Case(
        words=words_of([replace(TEXT, bits=1 << bit) for bit in range(32)] + [LAST_ID] * 9)
    ),
    "all modality bits": Case(words=words_of([replace(TEXT, bits=ALL_BITS)] * 40)),
    "causal without modality sees its island": Case(
        words=words_of([TEXT] * 9 + [Token(island=4, bits=0)] * 20 + [TEXT] * 9)
    ),
    "causal without modality or island": Case(words=words_of([TEXT] * 40 + [Token(bits=0)] * 30 + [TEXT] * 9)),
    "logits of 1e4": Case(words=mixed(), spoil=large_logits),
    "infinite where nothing sees": Case(words=mixed(), spoil=infinite_padding(mixed())),
    "infinite where nothing sees, dK and dV one after the other": Case(
        words=mixed(), spoil=infinite_padding(mixed()), tiles=tiles(32, 32, 32, passes=2)
    ),
    "huge gradient on padded rows": Case(words=mixed(), spoil=scaled("dout", 1e30, slice(156, None))),
    "more keys than queries": Case(words=later(mixed(), 100), kv_words=mixed()),
    "more queries than keys": Case(words=mixed(), kv_words=later(mixed(), 100)),
    "one query head a key head": Case(words=mixed(), heads=(2, 2)),
    "four query heads a key head": Case(words=mixed(), heads=(8, 2), blocks=(64, 64)),
    "eight query heads a key head": Case(words=mixed(), heads=(8, 1), blocks=(64, 64)),
    "head dim 96": Case(words=mixed(), dim=96),
    "head dim 128": Case(words=mixed(), dim=128),
    "head dim 256": Case(words=mixed(), dim=256, cap=2) if DEVICE == "cpu" else Case(words=causal(1)),
    "strides of projections and slices": Case(words=mixed(), spoil=strided),
    "rows off 16 bytes": Case(words=mixed(), spoil=unaligned),
    "window": Case(words=mixed(), window=7),
    "window of one token": Case(words=mixed(), window=1),
    "window longer than all": Case(words=mixed(), window=1000),
    "batch": Case(words=BATCH, blocks=(64, 64)),
    "batch in splits": Case(words=BATCH, blocks=(64, 64), cap=1),
    "blocks of 128, shipped tiles": Case(words=mixed(300), blocks=(128, 128)),
}


LONG = (
    "head dim 256",
    "batch in splits",
    "eight query heads a key head",
    "infinite where nothing sees, dK and dV one after the other",
    "blocks of queries shorter than of keys",
    "causal without modality or island",
)
"""Cases that take seconds in the interpreter, and are near to another."""


def slow_if(long: bool, *values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow) if long else pytest.param(*values)


@pytest.mark.parametrize("case", [slow_if(name in LONG, case) for name, case in HARD.items()], ids=HARD.keys())
def test_hard_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("kind", [slow_if(kind not in ("EP", "EE", "MP", "padded"), kind) for kind in KINDS])
def test_random_masks(kind: str) -> None:
    for seed in range(2):
        check(Case(words=random_words(seed, 150, kind), window=(None, 20)[seed], heads=(1, 1), cap=(2, None)[seed]))


def test_every_class_of_tiles_is_met() -> None:
    assert torch.diff(Case(words=mixed()).plan().queries.bounds).sum(0).all()


def test_one_wrong_bit_would_show() -> None:
    """Queries and keys of zero give the uniform mean over visible keys; values are one-hot, so the mean is the mask."""
    for seed in range(20):
        words = random_words(seed, 64, KINDS[seed % len(KINDS)])
        case = Case(words=words, window=(None, 13)[seed % 3 == 2], heads=(1, 1), blocks=((16, 32), (64, 64))[seed % 2])
        seen = dense_mask(*words, window=case.window)[0].double()
        zero = torch.zeros(1, 1, 64, 64)
        tensors = {"q": zero, "k": zero, "v": torch.eye(64)[None, None], "dout": zero, "dlse": zero[..., 0]}
        got = run(case, tensors)
        counts = seen.sum(1, keepdim=True)
        torch.testing.assert_close(got["out"][0, 0].double() * counts, seen, rtol=0, atol=1e-5)
        torch.testing.assert_close(got["lse"][0, 0].double().exp(), counts[:, 0], rtol=1e-5, atol=0)


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_permuting_tokens_permutes_results() -> None:
    case = Case(words=mixed())
    tensors, order = case.tensors(), torch.randperm(170)
    moved = {name: x[:, :, order] for name, x in tensors.items()}
    got = run(replace(case, words=(case.words[0][:, order], case.words[1][:, order])), moved)
    for name, x in run(case, tensors).items():
        same(got[name], x[:, :, order])


def test_padding_changes_nothing() -> None:
    case = Case(words=mixed(156))
    tensors = case.tensors()
    padded = {name: torch.cat([x, torch.randn_like(x[:, :, :40])], 2) for name, x in tensors.items()}
    got = run(replace(case, words=mixed(196)), padded)
    for name, x in run(case, tensors).items():
        same(got[name][:, :, :156], x)
        assert name == "lse" or not got[name][:, :, 156:].any()


def test_documents_packed_are_documents_alone() -> None:
    case = Case(words=words_of([replace(TEXT, document=n) for n, length in ((1, 57), (2, 70)) for _ in range(length)]))
    tensors = case.tensors()
    together = run(case, tensors)
    for part in (slice(0, 57), slice(57, None)):
        alone = replace(case, words=(case.words[0][:, part], case.words[1][:, part]))
        for name, x in run(alone, {name: x[:, :, part] for name, x in tensors.items()}).items():
            same(together[name][:, :, part], x)


@pytest.mark.parametrize("cap", (1, 2, 3))
def test_splitting_work_changes_nothing(cap: int) -> None:
    case = Case(words=mixed())
    tensors = case.tensors()
    whole, split = run(case, tensors), replace(case, cap=cap)
    assert split.plan().queries.num_slots and split.plan().keys.num_slots
    for name, x in run(split, tensors).items():
        same(x, whole[name])


def test_results_repeat_bit_by_bit() -> None:
    case = Case(words=mixed(), cap=2)
    tensors = case.tensors()
    first = run(case, tensors)
    assert all(torch.equal(x, first[name]) for name, x in run(case, tensors).items())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_rounds_inputs_and_outputs_only(dtype: torch.dtype) -> None:
    case = Case(words=mixed(), dtype=dtype)
    tensors = case.tensors()
    got, wanted = run(case, tensors), expected(case, tensors)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        assert ((got[name].double() - wanted[name]).norm() <= 1e-2 * wanted[name].norm()).item(), name
    assert got["lse"].dtype == torch.float32


def test_gradients_in_a_wider_dtype() -> None:
    case = Case(words=causal(40), dtype=torch.bfloat16)
    q, k, v, dout, _ = (x.to(DEVICE) for x in case.tensors().values())
    words = on_device(case.words)
    call = MaskWords(*words, *words), SCALE, plan_blocks(*words)
    out, lse = triton.forward(q, k, v, *call)
    wide = triton.backward(dout, None, q, k, v, out, lse, *call, torch.float32)
    narrow = triton.backward(dout, None, q, k, v, out, lse, *call)
    assert all(x.dtype == torch.float32 for x in wide)
    assert all(torch.equal(x.bfloat16(), y) for x, y in zip(wide, narrow, strict=True))


def test_what_the_kernels_do_not_do_is_refused() -> None:
    q = torch.randn(1, 2, 20, 64, device=DEVICE)
    mask = *on_device(causal(20)), *on_device(causal(20))
    plan = plan_blocks(*mask)

    def forward(
        q: Tensor, k: Tensor, scale: float = 1.0, window: int | None = None, tiles: Config | None = None
    ) -> None:
        triton.forward(q, k, k, MaskWords(*mask, window), scale, plan, tiles=tiles)

    with pytest.raises(ConfigError, match="wanted equal head dims out of 64, 96, 128, 256"):
        forward(q[..., :32], q[..., :32])
    with pytest.raises(ConfigError, match="heads that are a multiple of key heads"):
        forward(q[:, :1], q)
    with pytest.raises(ConfigError, match="got torch.float64.*wanted one of torch.float32"):
        forward(q.double(), q.double())
    with pytest.raises(ConfigError, match="got a scale of 0.0; wanted more than 0"):
        forward(q, q, 0.0)
    with pytest.raises(ConfigError, match="window None was given for q.*and window 5"):
        forward(q, q, window=5)
    with pytest.raises(ConfigError, match=r"sides \(96, 128, 64\) do not divide blocks of 128 queries"):
        forward(q, q, tiles=tiles(96, 128, 64))


def test_package_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention.impl import triton_launch as triton
from mmcompile.kernels.bitfield_attention.masks.block_plan import plan_blocks
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords
words, q = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 1, 4, 64)
places = torch.arange(4)[None]
try:
    triton.forward(q, q, q, MaskWords(words, places, words, places), 1.0, plan_blocks(words))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert "need the package triton, 3.6 or later" in done.stdout
