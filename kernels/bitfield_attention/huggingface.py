"""Bitfield attention in Hugging Face models, by the name `mmcompile_bitfield`.

    use_bitfield_attention(model)
    model(input_ids, ..., bitfield_words=words)

Words, an int64 per token, encode the mask. They travel as a keyword argument, which models hand down to every attention layer,
also under gradient checkpointing, or as the `attention_mask` words[:, None, None, :]: models pass on a mask of four dims as is.
Without words a model whose own mask is plainly causal, with padding, gets words of that mask; any other mask raises.
If words are given, they are the mask, and a padding mask passed with them is not read.

An island is a set of tokens, such as an image's, that see each other in both directions. In Gemma 3 and 4 the sliding window
limits attention inside islands too; with words it limits only causal attention. The results are equal only while no island is
longer than the window; `check_words_reach_every_layer` checks that.

The name is registered for attention and for masks: with the first alone, models drop the mask silently.
Works with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from mmcompile.errors import ConfigError, MaskError
from mmcompile.kernels.bitfield_attention.api import bitfield_attention
from mmcompile.kernels.bitfield_attention.huggingface_trace import current_trace
from mmcompile.kernels.bitfield_attention.masks.convert import words_from_ids
from mmcompile.kernels.bitfield_attention.masks.words import visible

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["use_bitfield_attention"]

NAME = "mmcompile_bitfield"
"""Name under which this attention is registered in transformers."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def register() -> None:
    """Register the attention and its mask function with transformers under `NAME`; repeated calls have no effect."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)


def use_bitfield_attention(model: PreTrainedModel, components: Iterable[str] | None = None) -> None:
    """Set the attention of the given parts of a model to `NAME`; the other parts keep their attention.

    Args:
        model: model of transformers.
        components: sub-configs by dotted name ("text_config", "thinker_config.text_config"); None is the language
            model.

    Raises:
        ConfigError: no such part, or one whose attention cannot be chosen by name.
    """
    from transformers import PreTrainedModel

    register()
    chosen = {name: _sub_config(model.config, name) for name in components or ()}
    for name, config in (chosen or {"language model": model.config.get_text_config()}).items():
        owners = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config]
        for owner in owners:
            owner.set_attn_implementation(NAME)
        if not owners or config._attn_implementation != NAME:  # pyright: ignore[reportPrivateUsage]
            raise ConfigError(
                f"{type(model).__name__} has no part of its own for {name} whose attention can be set by name; "
                f"sub-configs are {', '.join(model.config.sub_configs) or 'none'}"
            )


def _sub_config(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    for part in name.split("."):
        if part not in config.sub_configs:
            raise ConfigError(
                f"{type(config).__name__} has no sub-config {part!r}; choose {', '.join(config.sub_configs) or 'none'}"
            )
        config = getattr(config, part)
    return config


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    bitfield_words: torch.Tensor | None = None,
    bitfield_positions: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute bitfield attention in a model; the signature is that of an attention function of transformers.

    Args:
        module: the attention layer that makes the call.
        query: [B, H, Tq, D], rotated. key, value: [B, Hkv, Tk, D], heads not repeated.
        attention_mask: int64 [B, 1, 1, Tk], words; or a mask of another kind, where words do not apply.
        scaling: factor on the scores. sliding_window: causal reach in tokens, or None.
        bitfield_words: [B, Tk] int64 words of all keys, those in a cache included.
        bitfield_positions: [B, Tk] integers; None for 0, 1, 2, ...
        options: all other keyword arguments of the model; read only to refuse those that change attention.

    Returns:
        ([B, Tq, H, D] contiguous, None in place of attention weights).

    Raises:
        ConfigError: dropout, softcap, sinks or another option that changes attention.
        MaskError: no words are given, or words for another number of tokens.
    """
    where = _name(module)
    _refuse(where, dropout, options)
    carried = attention_mask if attention_mask is not None and attention_mask.dtype == torch.int64 else None
    if carried is None and _is_not_ours(module, where, query, key, attention_mask, bitfield_words):
        if trace := current_trace():
            trace.others[module] += 1
        return _sdpa(module, query, key, value, attention_mask, scaling)
    if trace := current_trace():
        trace.note_call(module, bitfield_words, sliding_window)
    words = bitfield_words
    if words is None and carried is not None and carried.shape[-1]:
        words = carried[:, 0, 0]
    if words is None:
        raise MaskError(
            f"{where} got no words, and the model's own mask is not plainly causal; "
            "pass bitfield_words=words to the model, of build_mask or words_from_ids"
        )
    if words.ndim != 2 or words.shape[1] != key.shape[2]:
        raise MaskError(
            f"{where} got words {list(words.shape)} for {key.shape[2]} keys; wanted [batch, {key.shape[2]}]: "
            "with a cache, give the words of all tokens so far"
        )
    return _attend(module, query, key, value, words, bitfield_positions, scaling, sliding_window), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    words: torch.Tensor,
    positions: torch.Tensor | None,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    first, kv_words, kv_positions = key.shape[2] - query.shape[2], None, None
    if first:
        kv_words = words
        kv_positions = torch.arange(words.shape[1], dtype=torch.int32, device=words.device).expand_as(words)
        kv_positions = kv_positions if positions is None else positions
        words, positions = kv_words[:, first:], kv_positions[:, first:]
        if query.shape[2] == 1:  # A decoding step: one row of mask is cheaper than a plan.
            seen = visible(words, positions, kv_words, kv_positions, window)[:, None]
            return _sdpa(module, query, key, value, seen, scale)[0]
    out = bitfield_attention(
        query,
        key,
        value,
        words,
        positions=positions,
        kv_words=kv_words,
        kv_positions=kv_positions,
        scale=scale,
        window=window,
    )
    return out.transpose(1, 2).contiguous()


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """Return the mask that a model passes to `attention`; the signature is that of a mask function of transformers.

    Returns:
        Mask words, int64 [B, 1, 1, Tk], if the mask is causal with padding. An empty int64 [B, 1, 1, 0] for another mask of
        causal attention, whose words the caller must pass by keyword. The mask of `sdpa` where words do not apply: in a step with
        a cache, and in bidirectional attention.
    """
    from transformers.masking_utils import sdpa_mask

    cached = q_length != kv_length or (isinstance(q_offset, int) and q_offset != kv_offset)
    if cached or "allow_is_bidirectional_skip" in options:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # pyright: ignore[reportArgumentType]
            kv_offset=kv_offset,
            mask_function=mask_function,  # pyright: ignore[reportArgumentType]
            attention_mask=attention_mask,
            device=device,
            **{**options, "allow_is_causal_skip": False},
        )
    if not _is_causal(mask_function):
        return torch.empty(batch_size, 1, 1, 0, dtype=torch.int64, device=device)
    if trace := current_trace():
        trace.own_masks += 1
    kept = torch.ones(batch_size, kv_length, dtype=torch.int64, device=device)
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.int64)
    return words_from_ids(kept)[:, None, None]


def _is_causal(mask_function: Callable[..., torch.Tensor] | None) -> bool:
    """Return whether a mask function of transformers is only causal, optionally with a sliding window.

    Composed mask functions are closures: this function compares their code, and reads their parts from the closure cells.
    """
    from transformers import masking_utils

    if mask_function is None:
        return False
    causal = masking_utils.causal_mask_function
    intersection = masking_utils.and_masks(causal).__code__
    window = masking_utils.sliding_window_overlay(1).__code__
    parts: tuple[Any, ...] = (mask_function,)
    if mask_function.__code__ is intersection:
        cells = dict(zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True))
        parts = cells["mask_functions"].cell_contents
    return causal in parts and all(part is causal or part.__code__ is window for part in parts)


def _is_not_ours(
    module: torch.nn.Module,
    where: str,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    words: torch.Tensor | None,
) -> bool:
    # Layers of transformers say whether they are causal self-attention; cross-attention may not say anything.
    is_causal = getattr(module, "is_causal", None)
    if is_causal:
        return words is None and attention_mask is not None and query.shape[2] != key.shape[2]
    if words is not None and is_causal is False and query.shape[2] == key.shape[2]:
        raise MaskError(f"{where} got words, but made no causal mask; leave its config out of `components`")
    if is_causal is None and attention_mask is None:
        raise MaskError(f"{where} says not whether it is causal and has no mask; leave its config out of `components`")
    return True


def _sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, is_causal=False)


def _refuse(where: str, dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise ConfigError(
            f"{where} wants dropout {dropout} of attention weights, which are not kept; set it to 0 in its config"
        )
    if options.get("output_attentions"):
        raise ConfigError(f"{where} was asked for attention weights, which are not kept; use another implementation")
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(
                f"{where} needs {name}, which bitfield attention does not compute; keep its own implementation"
            )


def _name(module: torch.nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__} of layer {index}"
