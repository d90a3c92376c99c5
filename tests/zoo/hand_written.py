"""Two plain modules that no library knows: a two-encoder multimodal model and a chain of equal blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.family import IGNORE, Batch, Draw, Family, Size
from zoo.parts import AUDIO, IMAGE, VOCABULARY, conversation

_WIDTH = 32
_HEADS = 4
_PATCH = 14
_IMAGE_TOKENS = 16
_AUDIO_BINS = 16
_AUDIO_STRIDE = 4
_AUDIO_FRAMES = 32
_AUDIO_TOKENS = _AUDIO_FRAMES // _AUDIO_STRIDE


class Block(nn.Module):
    """A pre-norm transformer block; causal where asked."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """[samples, tokens, width] -> the same; `mask` [samples, 1, tokens, tokens] is true where attention may look."""
        samples, tokens, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        heads = projected.view(samples, tokens, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.causal and mask is None
        )
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return hidden + self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))


class Tower(nn.Module):
    """A linear patch embedding with learned positions, and blocks that see everything."""

    def __init__(self, features: int, tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor) -> Tensor:
        """[media, tokens, features] -> [media, tokens, width]."""
        hidden = self.embed(features) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


class CausalText(nn.Module):
    """Causal blocks from token embeddings to hidden states."""

    def __init__(self, width: int, depth: int, max_length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, embeddings: Tensor, attention_mask: Tensor) -> Tensor:
        """[samples, tokens, width] embeddings and their mask [samples, tokens] -> hidden states of the same shape."""
        tokens = embeddings.shape[1]
        position = torch.arange(tokens, device=embeddings.device)
        causal = position[:, None] >= position[None, :]
        mask = causal[None, None] & attention_mask[:, None, None, :].bool()
        hidden = embeddings + self.positions(position)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.norm(hidden)


class TwoEncoderNet(nn.Module):
    """An image and an audio encoder, a projector each, and a causal transformer that reads both with the text."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Tower(3 * _PATCH * _PATCH, _IMAGE_TOKENS, _WIDTH, depth=4)
        self.hearing = Tower(_AUDIO_BINS * _AUDIO_STRIDE, _AUDIO_TOKENS, _WIDTH, depth=2)
        self.vision_projector = nn.Sequential(nn.Linear(_WIDTH, 64), nn.GELU(), nn.Linear(64, 64))
        self.hearing_projector = nn.Linear(_WIDTH, 64)
        self.text = CausalText(64, depth=4, max_length=256)
        self.head = nn.Linear(64, VOCABULARY, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        images: Tensor | None = None,
        sounds: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Logits, and the loss where labels are given.

        Args:
            input_ids: [samples, tokens], with 16 image and 8 audio placeholders for each picture and sound.
            attention_mask: [samples, tokens].
            labels: [samples, tokens]; -100 carries no loss.
            images: [pictures, 3, 56, 56], in the order of their placeholders.
            sounds: [sounds, 32, 16], frames of 16 bins.
        """
        embeddings = self.text.embed(input_ids)
        if images is not None:
            features = self.vision_projector(self.vision(_patches(images)))
            embeddings = _merge(embeddings, input_ids == IMAGE, features)
        if sounds is not None:
            frames = sounds.reshape(sounds.shape[0], _AUDIO_TOKENS, _AUDIO_STRIDE * _AUDIO_BINS)
            features = self.hearing_projector(self.hearing(frames))
            embeddings = _merge(embeddings, input_ids == AUDIO, features)
        logits = self.head(self.text(embeddings, attention_mask))
        return _with_loss(logits, labels)


class TextChain(nn.Module):
    """Equal causal blocks over text; nothing else, so that stages of equal length cost the same."""

    def __init__(self, width: int = 64, depth: int = 8, max_length: int = 256) -> None:
        super().__init__()
        self.text = CausalText(width, depth, max_length)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits [samples, tokens, vocabulary], and the loss where labels [samples, tokens] are given."""
        logits = self.head(self.text(self.text.embed(input_ids), attention_mask))
        return _with_loss(logits, labels)


def _patches(images: Tensor) -> Tensor:
    """[pictures, 3, 56, 56] -> [pictures, 16, 588]."""
    return F.unfold(images, kernel_size=_PATCH, stride=_PATCH).transpose(1, 2)


def _merge(embeddings: Tensor, where: Tensor, features: Tensor) -> Tensor:
    """Put `features`, in order, at the true positions of `where` [samples, tokens]."""
    mask = where.unsqueeze(-1).expand_as(embeddings)
    return embeddings.masked_scatter(mask, features.to(embeddings.dtype))


def _with_loss(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    if labels is None:
        return {"logits": logits}
    predicted, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return {"loss": F.cross_entropy(predicted, wanted, ignore_index=IGNORE), "logits": logits}


def _two_encoder_inputs(draw: Draw, size: Size) -> Batch:
    """`media` pairs of a picture and a sound a row."""
    batch = conversation(draw, size, [(IMAGE, _IMAGE_TOKENS), (AUDIO, _AUDIO_TOKENS)] * size.media)
    media = size.samples * size.media
    if media:
        batch["images"] = draw.normal(media, 3, 56, 56)
        batch["sounds"] = draw.normal(media, _AUDIO_FRAMES, _AUDIO_BINS)
    return batch


def _text_inputs(draw: Draw, size: Size) -> Batch:
    return conversation(draw, size, [])


FAMILIES = (
    Family(
        name="two_encoder_net",
        model=TwoEncoderNet,
        inputs=_two_encoder_inputs,
        first=Size(samples=2, length=48, media=1),
        second=Size(samples=3, length=72, media=2),
        text_only=True,
    ),
    Family(
        name="text_chain",
        model=TextChain,
        inputs=_text_inputs,
        first=Size(samples=2, length=32, media=0),
        second=Size(samples=3, length=40, media=0),
        text_only=True,
    ),
)
