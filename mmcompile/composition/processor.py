"""`ComposedProcessor`: a conversation with its images and audio clips -> one sample for `engine.step` and `mm.pack`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmcompile.composition.encoder import default_inputs, modality, parameters_of
from mmcompile.composition.model import ComposedModel
from mmcompile.composition.probe import dtype_of
from mmcompile.data.collate import IGNORED_LABEL, Value, join
from mmcompile.errors import BatchError, ConfigError

_ASSISTANT = "assistant"
Message = Mapping[str, str]
"""`role` and `content`, as in Hugging Face chat templates."""


@dataclass(kw_only=True, slots=True)
class ComposedProcessor:
    """Processor of one composed model: joins its tokenizer and the processors of its encoders."""

    model: ComposedModel = field(repr=False)
    tokenizer: Any
    processors: Mapping[str, Any]
    """Encoder -> image processor or feature extractor, called with one image or audio clip and `return_tensors="pt"`."""
    markers: Mapping[str, str] = field(default_factory=dict)
    """Encoder -> marker of an image or audio clip in a message.

    `<image>` and `<audio>`, or `<name>` if two encoders have one modality.
    """
    _counts: dict[Any, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        names = self.model.encoder_names
        if set(self.processors) != set(names):
            raise ConfigError(
                f"processors are for {', '.join(self.processors)}; wanted one for each of {', '.join(names)}"
            )
        kinds = {name: modality(self.model.encoder(name).module) for name in names}
        only = {name: kind if list(kinds.values()).count(kind) == 1 else name for name, kind in kinds.items()}
        self.markers = {name: f"<{word}>" for name, word in only.items()} | dict(self.markers)
        if set(self.markers) != set(names) or len(set(self.markers.values())) < len(names):
            raise ConfigError(f"markers are {dict(self.markers)}; wanted one of its own for each of {', '.join(names)}")

    def __call__(
        self, messages: Sequence[Message], media: Mapping[str, Sequence[Any]] | None = None
    ) -> dict[str, Value]:
        """Return one conversation as a sample.

        Tokens of the assistant carry loss, all others have label -100. With a chat template, the template decides which text is
        the assistant's; without one, contents are concatenated unchanged, and each answer ends with the tokenizer's end-of-text
        token.

        Args:
            messages: markers in their contents stand for images and sounds, in order.
            media: encoder -> images or sounds, each as its processor takes one.

        Returns:
            input_ids, attention_mask, labels [1, S], and the inputs of the encoders.

        Raises:
            BatchError: markers differ in number from images or sounds, or `media` names no encoder of the model.
            ConfigError: a chat template that changes earlier messages when one is added.
        """
        media = media or {}
        if unknown := set(media) - set(self.model.encoder_names):
            raise BatchError(
                f"media for {', '.join(sorted(unknown))}; encoders are {', '.join(self.model.encoder_names)}"
            )
        inputs = {name: [self._inputs(name, one) for one in given] for name, given in media.items() if len(given)}
        counts = {name: iter([self._count(name, one) for one in given]) for name, given in inputs.items()}
        ids: list[int] = []
        labels: list[int] = []
        for text, trains in self._texts(messages):
            for piece in self._tokens(text, counts):
                ids += piece
                own = trains and not set(piece) <= set(self.model.placeholders.values())
                labels += piece if own else [IGNORED_LABEL] * len(piece)
        self._check_used(counts, inputs)
        sample: dict[str, Value] = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "labels": torch.tensor([labels]),
        }
        for given in inputs.values():
            for key in given[0]:
                sample[key] = join(key, [(index, one[key]) for index, one in enumerate(given)], 0)
        return sample

    def _inputs(self, name: str, medium: Any) -> dict[str, Tensor]:
        """Return the inputs of encoder `name` that its processor makes of one image or audio clip: name in a batch -> tensor."""
        processor, module = self.processors[name], self.model.encoder(name).module
        accepts = inspect.signature(processor.__call__).parameters
        options: dict[str, Any] = {}
        if hasattr(processor, "sampling_rate"):
            options["sampling_rate"] = processor.sampling_rate
        if "return_attention_mask" in accepts and hasattr(module, "_get_feature_vector_attention_mask"):
            options["return_attention_mask"] = True  # sounds of different lengths are padded later
        returned = processor(medium, return_tensors="pt", **options)
        usual, names = default_inputs(module), self.model.input_names[name]
        found: dict[str, Tensor] = {}
        for parameter in parameters_of(module):
            value = next((returned[k] for k in (names[parameter], usual[parameter], parameter) if k in returned), None)
            if isinstance(value, Tensor):
                found[names[parameter]] = value.to(dtype_of(module)) if value.is_floating_point() else value
        if not found:
            raise ConfigError(
                f"the processor of {name!r} ({type(processor).__name__}) returned {', '.join(returned)}; the encoder takes "
                f"{', '.join(parameters_of(module))}. Say which is which: Encoder(module, inputs=...)"
            )
        return found

    def _count(self, name: str, inputs: Mapping[str, Tensor]) -> int:
        """Return the number of placeholder tokens of one image or audio clip with these inputs of encoder `name`."""
        if name not in self.model.placeholders:
            return 0
        # The number follows from shapes, and from integer values such as grids.
        key = (
            name,
            *((k, tuple(v.shape), None if v.is_floating_point() else v.numpy().tobytes()) for k, v in inputs.items()),
        )
        if key not in self._counts:
            self._counts[key] = self.model.num_tokens(name, inputs)
        return self._counts[key]

    def _texts(self, messages: Sequence[Message]) -> Iterator[tuple[str, bool]]:
        """Yield the pieces of a conversation in order, each as (text, True if its tokens carry loss)."""
        if not getattr(self.tokenizer, "chat_template", None):
            yield getattr(self.tokenizer, "bos_token", None) or "", False
            for message in messages:
                end = getattr(self.tokenizer, "eos_token", None) or "" if message["role"] == _ASSISTANT else ""
                yield message["content"] + end, message["role"] == _ASSISTANT
            return
        done = ""
        for index, message in enumerate(messages):
            if message["role"] == _ASSISTANT:
                prompt = self._rendered(messages[:index], done, add_generation_prompt=True)
                yield prompt, False
                done += prompt
            if message["role"] == _ASSISTANT or index == len(messages) - 1:
                text = self._rendered(messages[: index + 1], done, add_generation_prompt=False)
                yield text, message["role"] == _ASSISTANT
                done += text

    def _rendered(self, messages: Sequence[Message], done: str, *, add_generation_prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
        if not text.startswith(done):
            raise ConfigError(
                f"the chat template changes earlier text when a message is added ({done[-40:]!r} became "
                f"{text[: len(done)][-40:]!r}), so nothing says which tokens are the answer; use a template that only appends"
            )
        return text[len(done) :]

    def _tokens(self, text: str, counts: Mapping[str, Iterator[int]]) -> Iterator[list[int]]:
        """Yield the token ids of a text in pieces, with placeholder tokens in place of markers.

        Args:
            counts: encoder -> number of placeholders for each of its markers in turn.
        """
        if not self.model.placeholders:
            yield self._ids(text)
            return
        owner = {marker: name for name, marker in self.markers.items()}
        for piece in re.split("(" + "|".join(map(re.escape, owner)) + ")", text):
            if piece not in owner:
                yield self._ids(piece)
                continue
            count = next(counts.get(owner[piece], iter(())), None)
            if count is None:
                raise BatchError(f"the messages have more {piece} than there are inputs of {owner[piece]!r} in media")
            yield [self.model.placeholders[owner[piece]]] * count

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _check_used(self, counts: Mapping[str, Iterator[int]], inputs: Mapping[str, Sequence[object]]) -> None:
        for name, left in counts.items():
            unused = len(list(left))
            if unused and name in self.model.placeholders:
                raise BatchError(
                    f"media has {len(inputs[name])} inputs of {name!r}, and the messages {len(inputs[name]) - unused} times "
                    f"{self.markers[name]}; wanted one marker for each"
                )
