"""Models of transformers with bitfield attention: their own masks, their own results, and errors where words cannot say it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import zoo
from support.oracles.masks_oracle import dense_mask
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from zoo.parts import IMAGE

from mmcompile.errors import ConfigError, MaskError
from mmcompile.kernels.bitfield_attention import words_from_ids
from mmcompile.kernels.bitfield_attention.huggingface import NAME, attention, register, use_bitfield_attention
from mmcompile.kernels.bitfield_attention.huggingface_trace import check_words_reach_every_layer, expect_words

DENSE = "sdpa_with_mask"
"""SDPA that always gets a mask, and shows it."""

MODELS = ("gemma3", "paligemma", "qwen2_5_vl", "mllama", "llava")


def build(name: str) -> PreTrainedModel:
    model = zoo.ALL[name].build(torch.float64)
    assert isinstance(model, PreTrainedModel)
    return model


def words_of_batch(name: str, batch: Mapping[str, Any]) -> Tensor:
    """Words of the mask the model makes: images of Gemma 3 and the prefix of PaliGemma are islands."""
    ids, documents = batch["input_ids"], batch["attention_mask"]
    if name == "gemma3":
        image = (ids == IMAGE).long()
        return words_from_ids(documents, image * (image.diff(dim=1, prepend=image[:, :1] * 0) > 0).cumsum(1))
    if name == "paligemma":
        return words_from_ids(documents, (batch["token_type_ids"] == 0).long())
    return words_from_ids(documents)


def step(model: PreTrainedModel, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and gradients by name."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.fixture
def seen_masks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, Tensor]]:
    """What layers of `DENSE` get: the class of the layer, its window and its mask."""
    seen: list[tuple[str, int | None, Tensor]] = []

    def show(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        seen.append((type(module).__name__, options.get("sliding_window"), mask))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def make(*args: Any, **options: Any) -> Tensor | None:
        return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    monkeypatch.setitem(AttentionInterface._global_mapping, DENSE, show)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, DENSE, make)
    return seen


def use_dense(model: PreTrainedModel) -> None:
    text = model.config.get_text_config()
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config is text:
            part.set_attn_implementation(DENSE)


@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("name", MODELS)
def test_words_equal_the_masks_models_compose(name: str, padded: bool, seen_masks: list) -> None:
    family, model = zoo.ALL[name], build(name)
    batch = family.padded_batch("right", dtype=torch.float64) if padded else family.second_batch(torch.float64)
    use_dense(model)
    with torch.no_grad():
        model(**batch)
    words = words_of_batch(name, batch)
    positions = torch.arange(words.shape[1]).expand_as(words)
    layers = [(window, mask) for layer, window, mask in seen_masks if "Cross" not in layer]
    assert layers
    for window, mask in layers:
        real = batch["attention_mask"].bool()[:, :, None]  # Models let padding look back; nobody reads what it sees.
        expected = dense_mask(words, positions, window=window)
        assert torch.equal(mask[:, 0] & real, expected)


@pytest.mark.parametrize("checkpointing", (False, True), ids=("plain", "checkpointing"))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")  # its new name is not in 5.17
def test_training_equals_that_with_the_dense_mask(name: str, checkpointing: bool) -> None:
    model, batch = build(name), zoo.ALL[name].padded_batch("right", dtype=torch.float64)
    loss, grads = step(model, batch)
    use_bitfield_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with expect_words(model) as calls:
        got_loss, got_grads = step(model, {**batch, "bitfield_words": words_of_batch(name, batch)})
    torch.testing.assert_close(got_loss, loss, rtol=1e-9, atol=1e-9)
    assert got_grads.keys() == grads.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(got_grads[parameter], grad, rtol=1e-7, atol=1e-9)
    assert set(calls.values()) == ({2} if checkpointing else {1})


def test_only_the_language_model_changes() -> None:
    model = build("llava")
    use_bitfield_attention(model)
    assert model.config.text_config._attn_implementation == NAME
    assert model.config.vision_config._attn_implementation == "sdpa"
    model = build("llava")
    use_bitfield_attention(model, ["text_config"])
    assert model.config.text_config._attn_implementation == NAME
    with pytest.raises(ConfigError, match="no sub-config 'language'; choose .*text_config"):
        use_bitfield_attention(model, ["language"])


def llama() -> tuple[PreTrainedModel, Tensor]:
    """The language model of a tiny LLaVA, and tokens for it."""
    model = build("llava")
    use_bitfield_attention(model)
    return model, torch.randint(5, 900, (1, 24))


def cache_for(model: PreTrainedModel) -> dict[str, Any]:
    """An empty cache, under the name this version of transformers takes it by."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": DynamicCache(config=model.config.get_text_config())}


def test_packed_documents_are_documents_alone() -> None:
    model, ids = llama()
    documents = torch.tensor([[1] * 10 + [2] * 14])
    places = torch.cat([torch.arange(10), torch.arange(14)])[None]
    together = model(input_ids=ids, position_ids=places, bitfield_words=words_from_ids(documents)).logits
    for part in (slice(0, 10), slice(10, None)):
        alone = model(input_ids=ids[:, part], bitfield_words=words_from_ids(documents[:, part])).logits
        torch.testing.assert_close(together[:, part], alone)


def test_permuted_tokens_carry_their_positions() -> None:
    model, ids = llama()
    order = torch.randperm(24)
    words = words_from_ids(torch.tensor([[1] * 10 + [2] * 14]))
    places = torch.arange(24, dtype=torch.int32)[None]
    straight = model(input_ids=ids, position_ids=places.long(), bitfield_words=words).logits
    permuted = model(
        input_ids=ids[:, order],
        position_ids=places[:, order].long(),
        bitfield_words=words[:, order],
        bitfield_positions=places[:, order],
    ).logits
    torch.testing.assert_close(permuted, straight[:, order])


def test_words_may_be_the_attention_mask() -> None:
    model, ids = llama()
    words = words_from_ids(torch.tensor([[1] * 10 + [2] * 14]))
    with expect_words(model) as calls:
        got = model(input_ids=ids, attention_mask=words[:, None, None, :]).logits
    assert set(calls.values()) == {1}
    torch.testing.assert_close(got, model(input_ids=ids, bitfield_words=words).logits)


@pytest.mark.parametrize("side", ("left", "right"))
def test_a_causal_mask_with_padding_needs_no_words(side: str) -> None:
    model = build("llava")
    batch = zoo.ALL["llava"].padded_batch("left" if side == "left" else "right", dtype=torch.float64)
    wanted = step(model, batch)
    use_bitfield_attention(model)
    torch.testing.assert_close(step(model, batch), wanted)


def test_a_sliding_window_needs_no_words() -> None:
    """Gemma 3 without images: causal, and causal within a window, by layer."""
    model, batch = build("gemma3"), zoo.ALL["gemma3"].text_only_batch(torch.float64)
    batch = {name: x for name, x in batch.items() if name != "token_type_ids"}
    model.eval()
    wanted = model(**batch).logits
    use_bitfield_attention(model)
    torch.testing.assert_close(model(**batch).logits, wanted)


@pytest.mark.parametrize("name", ("gemma3", "paligemma"))
def test_another_mask_without_words_is_an_error(name: str) -> None:
    model, batch = build(name), zoo.ALL[name].batch(torch.float64)
    use_bitfield_attention(model)
    with pytest.raises(MaskError, match="of layer 0 got no words.*pass bitfield_words=words"):
        model(**batch)


def test_packing_by_position_ids_without_words_is_an_error() -> None:
    model, ids = llama()
    places = torch.cat([torch.arange(10), torch.arange(14)])[None]
    with pytest.raises(MaskError, match="got no words"):
        model.eval()(input_ids=ids, position_ids=places, use_cache=False)


def test_decoding_step_by_step_equals_all_at_once() -> None:
    model, ids = llama()
    model.eval()
    words = words_from_ids(torch.ones_like(ids), torch.tensor([[1] * 8 + [0] * 16]))
    with torch.no_grad():
        wanted = model(input_ids=ids, bitfield_words=words).logits
        cache, parts = cache_for(model), []
        for first, last in ((0, 10), (10, 11), (11, 12), (12, 18), (18, 24)):  # Steps of one token, then of several.
            parts.append(model(input_ids=ids[:, first:last], bitfield_words=words[:, :last], **cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), wanted)


def test_generation_with_the_models_own_mask() -> None:
    model: Any  # What has `generate` is a mixin, which types do not show.
    model, ids = llama()
    options: dict[str, Any] = {
        "max_new_tokens": 5,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
    }
    model.eval()
    got = model.generate(input_ids=ids, **options)
    model.set_attn_implementation("sdpa")
    assert torch.equal(got, model.generate(input_ids=ids, **options))


def test_words_of_the_new_tokens_alone_are_an_error() -> None:
    model, ids = llama()
    words = words_from_ids(torch.ones_like(ids))
    cache = cache_for(model.eval())
    model(input_ids=ids[:, :10], bitfield_words=words[:, :10], **cache)
    with pytest.raises(MaskError, match=r"words \[1, 1\] for 11 keys.*give the words of all tokens so far"):
        model(input_ids=ids[:, 10:11], bitfield_words=words[:, 10:11], **cache)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "wants dropout 0.1"),
    "softcap": ({"softcap": 50.0}, "needs softcap"),
    "sinks": ({"s_aux": torch.zeros(4)}, "needs s_aux"),
    "position bias": ({"position_bias": torch.zeros(1, 4, 6, 6)}, "needs position_bias"),
    "weights": ({"output_attentions": True}, "was asked for attention weights"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_what_is_not_computed_is_refused(options: dict[str, Any], message: str) -> None:
    x = torch.randn(1, 4, 6, 8)
    module = torch.nn.Identity()
    with pytest.raises(ConfigError, match=f"Identity {message}"):
        attention(module, x, x, x, None, bitfield_words=words_from_ids(torch.ones(1, 6).long()), **options)


def test_scaling_and_window_are_honoured() -> None:
    x, words = torch.randn(1, 4, 6, 8, dtype=torch.float64), words_from_ids(torch.ones(1, 6).long())
    out, weights = attention(torch.nn.Identity(), x, x, x, words[:, None, None], scaling=0.7, sliding_window=2)
    band = torch.ones(6, 6).tril().triu(-1).bool()
    wanted = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=band, scale=0.7)
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out, wanted.transpose(1, 2))


def test_every_layer_is_counted() -> None:
    model, batch = build("gemma3"), zoo.ALL["gemma3"].batch(torch.float64)
    use_bitfield_attention(model)
    calls = check_words_reach_every_layer(model, {**batch, "bitfield_words": words_of_batch("gemma3", batch)})
    assert calls == {f"model.language_model.layers.{n}.self_attn": 1 for n in range(6)}


def drop_words(model: PreTrainedModel, layer: int) -> Callable[[], None]:
    """A layer that does not hand words down, as some write them; the returned function mends it."""

    def hook(module: torch.nn.Module, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {name: x for name, x in options.items() if name != "bitfield_words"}

    return model.model.language_model.layers[layer].register_forward_pre_hook(hook, with_kwargs=True).remove


def test_a_layer_that_loses_words_is_named() -> None:
    model, ids = llama()
    drop_words(model, 2)
    batch = {"input_ids": ids, "bitfield_words": words_from_ids(torch.ones_like(ids))}
    with pytest.raises(MaskError, match="layers.2.self_attn of 4 layers got a causal mask that the model made"):
        check_words_reach_every_layer(model, batch)


def test_a_model_that_was_never_switched_is_found() -> None:
    model, ids = build("llava"), torch.randint(5, 900, (1, 24))
    batch = {"input_ids": ids, "bitfield_words": words_from_ids(torch.ones_like(ids))}
    with pytest.raises(MaskError, match="of 4 layers never called bitfield attention.*use_bitfield_attention"):
        check_words_reach_every_layer(model, batch)


def test_islands_longer_than_the_window_are_found() -> None:
    """Gemma 3 cuts islands at its window, which words do not say."""
    model, batch = build("gemma3"), zoo.ALL["gemma3"].batch(torch.float64)
    use_bitfield_attention(model)
    ids = batch["input_ids"]
    words = words_from_ids(torch.ones_like(ids), torch.arange(48).lt(17).long().expand_as(ids))
    with pytest.raises(MaskError, match="island of 17 tokens is longer than the sliding window of 16"):
        check_words_reach_every_layer(model, {**batch, "bitfield_words": words})


def test_registering_twice_changes_nothing() -> None:
    register()
    before = dict(AttentionInterface._global_mapping)
    register()
    assert dict(AttentionInterface._global_mapping) == before
