"""Check that the caller's mask (`bitfield_words`, an int64 per token) reaches every attention layer of a Hugging Face model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.words import document, instance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_words_reach_every_layer", "expect_words"]

# Their sliding layers see window and (causal or island); with words it is (window and causal) or island.
_WINDOW_CUTS_ISLANDS = ("gemma3", "gemma4")


@dataclass(kw_only=True, slots=True)
class _Trace:
    """Numbers of attention calls of each layer in `expect_words`: with `bitfield_words`, without, with another kind of mask."""

    with_words: Counter[torch.nn.Module] = field(default_factory=Counter)
    without: Counter[torch.nn.Module] = field(default_factory=Counter)
    others: Counter[torch.nn.Module] = field(default_factory=Counter)
    """Calls that use another mask than `bitfield_words`: cross-attention, an encoder, a decoding step."""
    own_masks: int = 0
    """Number of times that a model made words from its own mask."""
    windows: dict[int, torch.Tensor] = field(default_factory=dict)

    def note_call(self, module: torch.nn.Module, words: torch.Tensor | None, window: int | None) -> None:
        (self.without if words is None else self.with_words)[module] += 1
        if window is not None and words is not None:
            self.windows[window] = words


_TRACE: ContextVar[_Trace | None] = ContextVar("bitfield attention calls", default=None)


def current_trace() -> _Trace | None:
    """Return the numbers of attention calls in the enclosing `expect_words`; None outside of it and under torch.compile."""
    return None if torch.compiler.is_compiling() else _TRACE.get()


@contextmanager
def expect_words(model: PreTrainedModel) -> Generator[Counter[str]]:
    """Raise on exit unless each self-attention layer of the language model received the caller's mask (`bitfield_words`).

    Yields:
        Layer name -> number of calls with words, filled on exit. Recomputed calls of gradient checkpointing count as
        calls.

    Raises:
        MaskError: a layer was not called, or received a mask that the model made; or (Gemma 3, 4) an island, which is tokens that
            all see each other, as those of one image, is longer than the sliding window.
    """
    trace, calls = _Trace(), Counter[str]()
    token = _TRACE.set(trace)
    try:
        yield calls
    finally:
        _TRACE.reset(token)
    layers = {name: layer for name, layer in _layers(model).items() if not trace.others[layer]}
    if not layers:
        raise MaskError(f"{type(model).__name__} has no self-attention layers to count in its language model")
    own = trace.without if trace.own_masks else Counter()
    calls.update({name: trace.with_words[layer] + trace.without[layer] - own[layer] for name, layer in layers.items()})
    missing = [name for name, layer in layers.items() if not trace.with_words[layer] + trace.without[layer]]
    if missing:
        raise MaskError(
            f"{_list(missing)} of {len(layers)} layers never called bitfield attention; "
            "set it with use_bitfield_attention(model) and run a batch in which they have work"
        )
    if own_mask := [name for name, layer in layers.items() if own[layer]]:
        raise MaskError(
            f"{_list(own_mask)} of {len(layers)} layers got a causal mask that the model made; wanted words of the caller: "
            "pass bitfield_words=, and see that the model hands keyword arguments down"
        )
    _check_islands(model, trace.windows)


def check_words_reach_every_layer(model: PreTrainedModel, batch: Mapping[str, object]) -> Counter[str]:
    """Run a batch forward, without gradients, inside `expect_words`.

    Args:
        model: after `use_bitfield_attention`.
        batch: arguments of the model's forward, `bitfield_words` included.

    Returns:
        Layer name -> number of calls with words.
    """
    with torch.no_grad(), expect_words(model) as calls:
        model(**batch)
    return calls


def _layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    config = model.config.get_text_config()
    return {
        name: part
        for name, part in model.named_modules()
        if hasattr(part, "is_causal") and hasattr(part, "layer_idx") and getattr(part, "config", None) is config
    }


def _check_islands(model: PreTrainedModel, windows: Mapping[int, torch.Tensor]) -> None:
    if not model.config.model_type.startswith(_WINDOW_CUTS_ISLANDS):
        return
    for window, words in windows.items():
        if (longest := _longest_island(words)) > window:
            raise MaskError(
                f"an island of {longest} tokens is longer than the sliding window of {window}: {model.config.model_type} would "
                "hide parts of it from its tokens, words would not; make the window longer or the island shorter"
            )


def _longest_island(words: torch.Tensor) -> int:
    rows = torch.arange(len(words), device=words.device)[:, None].expand_as(words)
    keys = torch.stack([rows, document(words), instance(words)], -1)[instance(words) != 0]
    return int(keys.unique(dim=0, return_counts=True)[1].max()) if len(keys) else 0


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
