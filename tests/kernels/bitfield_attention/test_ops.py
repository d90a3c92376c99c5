"""The op and its checked entry: torch's own checks, compilation, export, FLOPs, the shared plan, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.masks_oracle import KINDS, Token, dense_mask, random_words, words_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmcompile.errors import ConfigError, MaskError
from mmcompile.kernels.bitfield_attention import (
    bitfield_attention,
    bitfield_attention_reference,
    build_mask,
    visible_pairs,
)
from mmcompile.kernels.bitfield_attention.impl.backends import resolve_impl
from mmcompile.kernels.bitfield_attention.masks.builder import Document, Text
from mmcompile.kernels.bitfield_attention.masks.plan_cache import PlanCache
from mmcompile.kernels.bitfield_attention.ops import bitfield_attention_backward_op, bitfield_attention_op


def inputs(tokens: int = 140, batch: int = 2, dim: int = 8, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, heads, tokens, dim, **options) for heads in (4, 2, 2))
    return q, k, v


def masks(tokens: int = 140) -> tuple[Tensor, Tensor]:
    rows = [random_words(seed, tokens, kind) for seed, kind in enumerate(("MP", "padded"))]
    words, positions = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return words, positions


def attend(
    q: Tensor, k: Tensor, v: Tensor, words: Tensor, positions: Tensor, window: int | None = None
) -> tuple[Tensor, Tensor]:
    return bitfield_attention(q, k, v, words, positions=positions, window=window, return_lse=True)


def test_opcheck() -> None:
    words, positions = masks()
    tensors = [x.requires_grad_() for x in inputs()]
    call = words, positions, words, positions, 0.3
    torch.library.opcheck(bitfield_attention_op, (*tensors, *call, None, "auto"))
    torch.library.opcheck(bitfield_attention_op, (*tensors, words, None, words, None, 0.3, 9, "eager"))


def test_opcheck_of_backward() -> None:
    words, positions = masks()
    call = words, positions, words, positions, 0.3, None, "auto"
    q, k, v = inputs()
    out, lse = bitfield_attention_op(q, k, v, *call)
    torch.library.opcheck(bitfield_attention_backward_op, (out, lse, q, k, v, out, lse, *call))
    torch.library.opcheck(bitfield_attention_backward_op, (out, None, q, k, v, out, lse, *call, torch.float64))


@pytest.mark.parametrize("window", (None, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_definition(kind: str, window: int | None) -> None:
    words, positions = random_words(5, 150, kind)
    outcomes = []
    tensors = [x.requires_grad_() for x in inputs(150, 1, dtype=torch.float64)]
    for attention in (attend, bitfield_attention_reference):
        out, lse = attention(tensors[0], tensors[1], tensors[2], words, positions, window=window)
        some = lse.isfinite()
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        total = (out * weights).sum() + (lse * weights[..., 0])[some].sum()
        outcomes.append((out, lse, *torch.autograd.grad(total, tensors)))
    torch.testing.assert_close(*outcomes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("used", ("out", "lse"))
def test_one_output_alone_has_gradients(used: str) -> None:
    tensors = [x.requires_grad_() for x in inputs(20, 1, dtype=torch.float64)]
    words, positions = words_of([Token()] * 20)
    outcomes = []
    for attention in (attend, bitfield_attention_reference):
        out, lse = attention(tensors[0], tensors[1], tensors[2], words, positions)
        outcomes.append(
            torch.autograd.grad((out if used == "out" else lse).square().sum(), tensors, materialize_grads=True)
        )
    torch.testing.assert_close(*outcomes, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_finite_differences() -> None:
    words, positions = words_of([Token()] * 3 + [Token(causal=False, island=1)] * 3 + [Token(island=2)] * 2)
    tensors = [x.requires_grad_() for x in inputs(8, 1, dim=3, dtype=torch.float64)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: bitfield_attention(q, k, v, words, positions=positions, window=4, return_lse=True), tensors
    )


def test_partial_results_merge_by_log_sum_exp() -> None:
    """Halves of the keys apart, weighted by the exponential of their log-sum-exp, are the whole: values and gradients."""
    words, positions = random_words(1, 60, "EE-Gemma")
    tensors = [x.requires_grad_() for x in inputs(60, 1, dtype=torch.float64)]
    q, k, v = tensors
    parts = [
        bitfield_attention(
            q,
            k[:, :, half],
            v[:, :, half],
            words,
            positions=positions,
            kv_words=words[:, half],
            kv_positions=positions[:, half],
            return_lse=True,
        )
        for half in (slice(0, 30), slice(30, None))
    ]
    lse = torch.stack([part[1] for part in parts])
    shares = (lse - lse.logsumexp(0)).exp().nan_to_num(0.0).unsqueeze(-1)
    merged = (torch.stack([part[0] for part in parts]) * shares).sum(0)
    whole = bitfield_attention(q, k, v, words, positions=positions)
    seen = dense_mask(words, positions)[0].any(1)
    torch.testing.assert_close(merged[:, :, seen], whole[:, :, seen])
    grads = (torch.autograd.grad(x[:, :, seen].square().sum(), tensors, retain_graph=True) for x in (merged, whole))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_compiles_into_one_graph() -> None:
    words, _ = masks()
    tensors = [x.requires_grad_() for x in inputs()]

    def loss(q: Tensor, k: Tensor, v: Tensor, words: Tensor) -> Tensor:
        return bitfield_attention(q * 2, k, v, words, window=30).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    q, k, v = tensors
    got, wanted = (torch.autograd.grad(f(q, k, v, words), tensors) for f in (compiled, loss))
    torch.testing.assert_close(got, wanted)


def test_export_keeps_one_op() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, words: Tensor) -> Tensor:
            return bitfield_attention(q, k, v, words, window=30)

    words, _ = masks()
    program = torch.export.export(Layer(), (*inputs(), words))
    ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert ops.count(torch.ops.mmcompile.bitfield_attention.default) == 1
    assert not any("softmax" in str(op) or "bmm" in str(op) for op in ops)
    tensors = inputs()
    torch.testing.assert_close(program.module()(*tensors, words), Layer()(*tensors, words))


def test_flops_are_those_of_visible_pairs() -> None:
    words, positions = masks()
    q, k, v = (x.requires_grad_() for x in inputs())
    with FlopCounterMode(display=False) as counter:
        bitfield_attention(q, k, v, words, positions=positions).sum().backward()
    pairs = visible_pairs(words, positions)
    assert counter.get_total_flops() == (4 + 10) * pairs * q.shape[1] * q.shape[3]


def test_flops_without_values_are_those_of_all_pairs() -> None:
    words, positions = masks()
    q, k, v = (x.to("meta") for x in inputs())
    call = words.to("meta"), positions.to("meta")
    with FlopCounterMode(display=False) as counter:
        bitfield_attention_op(q, k, v, *call, *call, 0.3, None, "eager")
    assert counter.get_total_flops() == 4 * 2 * 140 * 140 * 4 * 8


def test_plans_are_shared_by_content_and_forgotten_by_age() -> None:
    cache = PlanCache(size=2)
    words, positions = masks()
    source = words, positions, words, positions
    first = cache.plan(source, None)
    copies = tuple(x.clone() for x in source)
    assert cache.plan((copies[0], copies[1], copies[2], copies[3]), None) is first
    assert cache.plan(source, 9) is not first
    assert cache.plan(source, None, "auto") is not first
    assert len(cache) == 2
    assert cache.plan(source, None) is not first


def test_a_mask_changed_in_place_gets_another_plan() -> None:
    words, positions = words_of([Token()] * 20)
    q, k, v = inputs(20, 1)
    before = bitfield_attention(q, k, v, words, positions=positions)
    words[:, :10] = 0
    after = bitfield_attention(q, k, v, words, positions=positions)
    assert not after[:, :, :10].any() and before[:, :, :10].any()


def test_words_of_the_builder_need_no_positions() -> None:
    words, positions = build_mask([[Document((Text(20),))]])
    q, k, v = inputs(20, 1)
    got = bitfield_attention(q, k, v, words)
    assert torch.equal(got, bitfield_attention(q, k, v, words, positions=positions, check=True))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, wanted)


WORDS, POSITIONS = words_of([Token()] * 20)
Q, KV = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
ERRORS: dict[str, tuple[type[ValueError], dict[str, Any], str]] = {
    "dims": (ConfigError, {"q": Q[0]}, r"q \[4, 20, 8\].*wanted \[batch, heads, tokens, dim\]"),
    "head dims": (ConfigError, {"k": KV[..., :4]}, "one head dim in q and k"),
    "keys and values": (ConfigError, {"v": KV[:, :, :7]}, "as many heads and tokens in k as in v"),
    "heads": (ConfigError, {"q": Q[:, :3]}, "3 query heads and 2 key heads; wanted a multiple"),
    "dtypes": (ConfigError, {"k": KV.double()}, "k torch.float64.*cast them alike"),
    "integers": (ConfigError, {"q": Q.long(), "k": KV.long(), "v": KV.long()}, "one floating dtype"),
    "words dtype": (MaskError, {"words": WORDS.int()}, r"words are torch.int32 \[1, 20\]; wanted int64 \[1, 20\]"),
    "words shape": (MaskError, {"words": WORDS[:, :7]}, r"\[1, 7\]; wanted int64 \[1, 20\].*build_mask"),
    "positions dtype": (MaskError, {"positions": POSITIONS.float()}, "positions are torch.float32.*wanted int32"),
    "positions shape": (MaskError, {"positions": POSITIONS[:, :3]}, r"\[1, 3\]; wanted int32 \[1, 20\]"),
    "positions of keys only": (MaskError, {"kv_positions": POSITIONS}, "kv_positions are given without kv_words"),
    "positions of one side": (MaskError, {"kv_words": WORDS, "positions": POSITIONS}, "for one side only"),
    "kv_words shape": (MaskError, {"kv_words": WORDS[:, :7]}, r"kv_words are .*\[1, 7\]"),
    "lengths": (MaskError, {"k": KV[:, :, :7], "v": KV[:, :, :7]}, "7 keys and 20 queries cannot share words"),
    "window": (MaskError, {"window": 0}, "a window of 0 tokens hides every key"),
    "falling positions": (MaskError, {"positions": POSITIONS.flip(1), "check": True}, "wanted increasing positions"),
    "implementation": (ConfigError, {"impl": "cuda"}, "impl='cuda'.*choose auto, eager, triton"),
    "device": (MaskError, {"words": WORDS.to("meta")}, "words are on meta and the tokens on cpu"),
}


@pytest.mark.parametrize(("error", "changed", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_say_what_is_wrong(error: type[ValueError], changed: dict[str, Any], message: str) -> None:
    call = {"q": Q, "k": KV, "v": KV, "words": WORDS, **changed}
    with pytest.raises(error, match=message):
        bitfield_attention(**call)


def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.empty(1, 4, 20, 64)
    with pytest.raises(ConfigError, match='Triton kernels here, but .*; use impl="eager"'):
        resolve_impl("triton", q, q)
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_impl("triton", q, q) == "triton"
    assert resolve_impl("auto", q, q) == "eager"
    with pytest.raises(ConfigError, match="head dims are 8 and 8.*64, 96, 128, 256"):
        resolve_impl("triton", q[..., :8], q[..., :8])
    with pytest.raises(ConfigError, match="torch.float64, and they take float32, float16, bfloat16"):
        resolve_impl("triton", q.double(), q.double())
