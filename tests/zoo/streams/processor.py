"""A family's processor with how its users call it, and the parts of processors that transformers makes only elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import ProcessorMixin, SmolVLMProcessor, VoxtralProcessor
from transformers.feature_extraction_utils import BatchFeature


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyProcessor:
    """The processor of a family, which makes its batches from text, pictures and sounds."""

    build: Callable[[], ProcessorMixin]
    picture: str = ""
    """Text that stands for a picture; empty if the family takes none."""
    sound: str = ""
    """Text that stands for a clip; empty if the family takes none."""
    by_row: bool = False
    """Pictures are passed as one list a row; else as one list a batch."""
    by_hand: str = ""
    """Parts that are written here, because transformers' own require packages that are not installed; empty if none."""


class _WithoutClips:
    """A processor without its video part, which requires torchvision and is unused where there are no videos."""

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> Any:
        if argument_name == "video_processor" and argument is None:
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


def without_videos(kind: type[ProcessorMixin]) -> Any:
    """Return the processor class, as a class whose video part may be None."""
    return type(kind.__name__, (_WithoutClips, kind), {})


class PixtralRows(ProcessorMixin):
    """Pixtral: each row of patches is followed by a token; transformers' class of the same layout requires torchvision."""

    text_kwargs = {"return_tensors": "pt"}
    images_kwargs = {"return_tensors": "pt"}

    def __init__(self, image_processor: Any, tokenizer: Any, *, patch_size: int, spatial_merge_size: int = 1) -> None:
        super().__init__(image_processor, tokenizer)
        self.image_token = "[IMG]"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self._side = patch_size * spatial_merge_size

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self._side})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """Return the placeholders of a picture."""
        height, width = (int(pixels) // self._side for pixels in image_inputs["image_sizes"][image_idx])
        return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"


class SmolVLMPictures(SmolVLMProcessor):
    """SmolVLM without its check for num2words, which only videos need."""

    def __init__(
        self, image_processor: Any, tokenizer: Any, video_processor: Any = None, *, image_seq_len: int
    ) -> None:
        self.fake_image_token, self.global_image_token = "<fake_token_around_image>", "<global-img>"
        self.image_token, self.video_token = "<image>", "<video>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.end_of_utterance_token = "<end_of_utterance>"
        self.image_seq_len = image_seq_len
        ProcessorMixin.__init__(self, image_processor, tokenizer, video_processor)


class VoxtralRows(VoxtralProcessor):
    """Voxtral: transformers' own features of chunks; its text requires the tokenizer of mistral_common."""

    def __init__(self, feature_extractor: Any, tokenizer: Any, *, chunk_frames: int, chunk_tokens: int) -> None:
        super().__init__(feature_extractor, tokenizer)
        self._frames, self._tokens = chunk_frames, chunk_tokens

    def __call__(self, *, text: Sequence[str], audio: Sequence[Any] | None = None, **options: Any) -> BatchFeature:
        """Return token ids and, with sounds, the features of their chunks, which have `chunk_tokens` placeholders each."""
        if not audio:
            return BatchFeature(dict(self.tokenizer(list(text), **options)))
        chunks = [self._chunks(sound) for sound in audio]
        runs = iter(["[AUDIO]" * (self._tokens * len(chunk)) for chunk in chunks])
        rows = [re.sub(r"\[AUDIO\]", lambda _: next(runs), row) for row in text]
        return BatchFeature({**self.tokenizer(rows, **options), "input_features": torch.cat(chunks)})

    def _chunks(self, sound: Any) -> Tensor:
        return self._retrieve_input_features(
            [sound],
            self._frames,
            sampling_rate=self.feature_extractor.sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self._frames * self.feature_extractor.hop_length,
            return_tensors="pt",
        )
