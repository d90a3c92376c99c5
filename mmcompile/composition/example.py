"""Example batches of composed models: random text with images or audio clips for each encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.composition.encoder import modality
from mmcompile.composition.joined import JoinedModel
from mmcompile.composition.probe import images as random_images
from mmcompile.composition.probe import sounds
from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import PlaceholderSpan, random_text

_LEAD = 2
"""Number of text tokens before the first image, and between two images."""


def example_batch(
    model: JoinedModel, *, batch_size: int, text_tokens: int, images: int, image_size: int, audios: int
) -> dict[str, Tensor]:
    """Return a batch of random tokens with labels on the text.

    Args:
        batch_size: number of samples.
        text_tokens: tokens of a sample, beside placeholders; fewer where the language model has no positions for them.
        images: images of a sample, for each vision encoder.
        image_size: height and width in pixels, for encoders that take any size.
        audios: audio clips of a sample, for each audio encoder.

    Raises:
        ConfigError: an encoder's inputs cannot be made, or leave no room for text.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    batch: dict[str, Tensor] = {}
    counts: list[int] = []
    spans: list[PlaceholderSpan] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in model.encoder_names:
            count = audios if modality(model.encoder(name).module) == "audio" else images
            if not count:
                continue
            media = _media(model, name, batch_size * count, image_size)
            batch.update(media)
            tokens = model.num_tokens(name, media) // (batch_size * count)
            counts += [tokens] * count
            token = model.placeholders.get(name)
            spans += [PlaceholderSpan(token=token, count=tokens)] * count if token is not None else []
        limit = getattr(config, "max_position_embeddings", None)
        room = limit - sum(counts) if isinstance(limit, int) and limit > 0 else text_tokens
        length = min(text_tokens, room)
        if length < _LEAD * (len(counts) + 1):
            raise ConfigError(
                f"an example batch has {length} text tokens around {len(counts)} images or sounds of "
                f"{sum(counts)} tokens in a language model of {limit} positions; wanted at least "
                f"{_LEAD * (len(counts) + 1)}: pass a batch of your own"
            )
        batch.update(random_text(int(config.vocab_size), batch_size, length, spans))
    return batch


def _media(model: JoinedModel, name: str, count: int, image_size: int) -> dict[str, Tensor]:
    """Return random inputs of encoder `name` for `count` images or audio clips: name in a batch -> tensor."""
    encoder = model.encoder(name)
    if encoder.example is not None:
        raise ConfigError(f"encoder {name!r} has inputs of its own (Encoder(example=...)); pass a batch of your own")
    if modality(encoder.module) != "audio":
        return {
            model.input_names[name][key]: value
            for key, value in random_images(encoder.module, count, image_size).items()
        }
    problems: list[str] = []
    for found in sounds(encoder.module, count):
        media = {model.input_names[name][key]: value for key, value in found.items()}
        try:
            model.num_tokens(name, media)
        except Exception as error:  # what an encoder raises for inputs that it does not know
            problems.append(str(error))
            continue
        return media
    raise ConfigError(f"no example can be made for encoder {name!r}: {'; '.join(problems)}; pass a batch of your own")
