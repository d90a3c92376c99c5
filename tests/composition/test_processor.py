"""Conversations become samples: placeholders counted and inserted, answers labelled, media as the encoders take them."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.models.compose_models import AUDIO_ENCODERS, LANGUAGE_MODELS, VISION_ENCODERS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.errors import BatchError, ConfigError

WORDS = ("<pad>", "<s>", "</s>", "what", "is", "this", "said", "a", "cat", "hello", "user", "assistant", "and", ":")
PATCHES = 16
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def _tokenizer(template: str | None = None) -> Any:
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    model.pre_tokenizer = Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@functools.cache
def _model(merge: Literal["placeholder", "prepend"]) -> mm.ComposedModel:
    clip = VISION_ENCODERS["clip"]
    return mm.compose(
        {
            "vision": mm.Encoder(clip.build(torch.float32), **clip.options),
            "audio": AUDIO_ENCODERS["wav2vec2"].build(torch.float32),
        },
        LANGUAGE_MODELS["llama"].build(torch.float32),
        merge=merge,
    )


def _processor(
    template: str | None = None, merge: Literal["placeholder", "prepend"] = "placeholder"
) -> mm.ComposedProcessor:
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return mm.ComposedProcessor(
        model=_model(merge),
        tokenizer=_tokenizer(template),
        processors={"vision": images, "audio": transformers.Wav2Vec2FeatureExtractor()},
    )


def _image(side: int = 80) -> Image.Image:
    return Image.fromarray(np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8))


def _sound(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).standard_normal(samples).astype(np.float32)


def _ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_a_conversation_without_a_template() -> None:
    processor = _processor()
    sample = processor(
        [
            {"role": "user", "content": "what is <image> <image> and <audio>"},
            {"role": "assistant", "content": "a cat"},
        ],
        {"vision": [_image(), _image(90)], "audio": [_sound(8000)]},
    )
    model = processor.model
    spoken = model.num_tokens("audio", {"input_values": torch.randn(1, 8000)})
    vision, audio = model.placeholders["vision"], model.placeholders["audio"]
    prompt = [*_ids("<s> what is"), *[vision] * 2 * PATCHES, *_ids("and"), *[audio] * spoken]
    answer = _ids("a cat </s>")
    assert sample["input_ids"].tolist() == [prompt + answer]  # type: ignore[union-attr]
    assert sample["labels"].tolist() == [[-100] * len(prompt) + answer]  # type: ignore[union-attr]
    assert sample["pixel_values"].shape == (2, 3, 56, 56)  # type: ignore[union-attr]
    assert sample["audio_attention_mask"].shape == sample["input_values"].shape == (1, 8000)  # type: ignore[union-attr]
    assert torch.isfinite(model(**sample).loss)


def test_a_chat_template_decides_what_is_prompt() -> None:
    processor = _processor(TEMPLATE)
    sample = processor(
        [
            {"role": "user", "content": "what is <image>"},
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hello"},
        ],
        {"vision": [_image()]},
    )
    parts = [
        (_ids("user : what is"), False),
        ([processor.model.placeholders["vision"]] * PATCHES, False),
        (_ids("</s> assistant :"), False),
        (_ids("a cat </s>"), True),
        (_ids("user : hello </s> assistant :"), False),
        (_ids("hello </s>"), True),
    ]
    assert sample["input_ids"].tolist() == [[token for ids, _ in parts for token in ids]]  # type: ignore[union-attr]
    assert sample["labels"].tolist() == [  # type: ignore[union-attr]
        [token if trains else -100 for ids, trains in parts for token in ids]
    ]


@pytest.mark.slow
def test_samples_of_different_sounds_and_pictures_go_into_one_batch_and_one_row() -> None:
    processor = _processor()

    def sample(*lengths: int) -> dict[str, Any]:
        said = " ".join(["<audio>"] * len(lengths))
        messages = [{"role": "user", "content": f"<image> {said}"}, {"role": "assistant", "content": "a cat"}]
        return processor(messages, {"vision": [_image()], "audio": [_sound(length) for length in lengths]})

    samples = [sample(8000), sample(4000, 6000)]
    alone = [processor.model(**one).loss for one in samples]
    assert torch.isfinite(processor.model(**collate(samples)).loss)
    packed = mm.pack(processor.model, samples)
    assert packed["input_ids"].shape[0] == 1  # type: ignore[union-attr]
    assert torch.isfinite(processor.model(**packed).loss)
    assert all(torch.isfinite(loss) for loss in alone)


def test_features_before_the_text_need_no_markers() -> None:
    processor = _processor(merge="prepend")
    sample = processor(
        [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a cat"}], {"vision": [_image()]}
    )
    assert sample["input_ids"].tolist() == [_ids("<s> what is this a cat </s>")]  # type: ignore[union-attr]
    assert torch.isfinite(processor.model(**sample).loss)


def test_markers_and_media_that_do_not_fit_are_refused() -> None:
    processor = _processor()
    ask = [{"role": "user", "content": "<image> what"}]
    with pytest.raises(BatchError, match="more <image> than there are inputs of 'vision'"):
        processor(ask)
    with pytest.raises(BatchError, match="media has 2 inputs of 'vision', and the messages 1 times <image>"):
        processor(ask, {"vision": [_image(), _image()]})
    with pytest.raises(BatchError, match="media for video; encoders are vision, audio"):
        processor(ask, {"video": [_image()]})
    processor.tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match="the chat template changes earlier text"):
        processor([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a cat"}])
    with pytest.raises(ConfigError, match="wanted one for each of vision, audio"):
        mm.ComposedProcessor(model=processor.model, tokenizer=processor.tokenizer, processors={})
