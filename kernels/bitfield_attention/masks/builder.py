"""Words of a batch, built from a description of its rows: texts, images, clips, videos, packed documents, padding.

    EP         Document((Image(1024), Text(96)))              encoder output before the text
    EE         Document((Text(20), Image(576), Text(30)))     encoder output inside the text
    EE-Gemma   Image(576, sees_earlier=True)                  the image also sees all tokens before it
    MP         a row of several documents                     documents do not see each other
    prefix-LM  Document((Prefix(128), Text(64)))
    video      Video(frames=8, tokens_per_frame=256)          a frame sees itself and earlier ones

Modalities are bit numbers 0..31; text is 0. The bits of a causal token are those of the modalities it sees, and a later token
sees it if they share a bit. So a part that sees all modalities is seen by every later causal token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.words import MAX_DOCUMENT, MAX_INSTANCE, NUM_MODALITIES, PADDING, pack

TEXT, IMAGE, AUDIO, VIDEO = range(4)
"""Default modality numbers."""
_ALL_MODALITIES = (1 << NUM_MODALITIES) - 1


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text tokens: each sees itself and earlier tokens."""

    length: int
    sees: tuple[int, ...] | None = None
    """Modality numbers that the text sees besides text; None for all."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A run of text tokens that see each other in both directions, and everything before them."""

    length: int
    sees: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """A run of image tokens, which see each other."""

    length: int
    modality: int = IMAGE
    sees_earlier: bool = False
    """True if the tokens also see all earlier tokens, as in Gemma 3."""
    island: str | None = None
    """Name of the island: images of a document with the same name see each other. None for an island without others."""


@dataclass(frozen=True, slots=True)
class Audio:
    """A run of tokens of one audio clip, which see each other; the fields are those of `Image`."""

    length: int
    modality: int = AUDIO
    sees_earlier: bool = False
    island: str | None = None


@dataclass(frozen=True, slots=True)
class Video:
    """A run of video frames; a frame's tokens see each other and all tokens of earlier frames (block-causal)."""

    frames: int
    tokens_per_frame: int
    sees: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Padding:
    """A run of padding tokens, which see no token and are seen by none."""

    length: int


Part = Text | Prefix | Image | Audio | Video | Padding


@dataclass(frozen=True, slots=True)
class Document:
    """One sample, as a sequence of parts; documents in one row do not see each other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TokenRun:
    """Adjacent tokens of a document with the same mask word (int64 with bits for what they see); padding if `bits` is 0."""

    length: int
    causal: bool
    bits: int
    island: str | bool = False
    """Island, whose tokens all see each other: a name shared by runs of a document, True for this run alone, False for none."""


def build_mask(rows: Sequence[Sequence[Document]], length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Build the words and positions of a batch.

    Args:
        rows: documents of each row, in order.
        length: number of tokens in every row, filled with padding; None for the length of the longest row.

    Returns:
        words [rows, length] int64 and positions [rows, length] int32.

    Raises:
        MaskError: more documents, islands or modalities than a word can number, a part without tokens, or a row too
            long.
    """
    built = [_row(row, f"row {index}") for index, row in enumerate(rows)]
    longest = max((len(words) for words in built), default=0)
    length = longest if length is None else length
    if longest > length:
        index = max(range(len(built)), key=lambda i: len(built[i]))
        raise MaskError(f"row {index} has {longest} tokens; wanted at most {length}: drop documents or raise length")
    words = torch.full((len(built), length), PADDING, dtype=torch.int64)
    for target, row in zip(words, built, strict=True):
        target[: len(row)] = row
    return words, torch.arange(length, dtype=torch.int32).expand_as(words).contiguous()


def _row(documents: Sequence[Document], where: str) -> torch.Tensor:
    if len(documents) > MAX_DOCUMENT:
        raise MaskError(
            f"{where} packs {len(documents)} documents; a word numbers at most {MAX_DOCUMENT}: use more rows"
        )
    runs: list[_TokenRun] = []
    numbers: list[tuple[int, int]] = []
    for index, document in enumerate(documents):
        place = f"{where}, document {index}"
        own = [run for number, part in enumerate(document.parts) for run in _runs(part, f"{place}, part {number}")]
        numbers += [
            (index + 1 if run.bits else 0, island) for run, island in zip(own, _islands(own, place), strict=True)
        ]
        runs += own
    document_ids, island_ids = torch.tensor(numbers, dtype=torch.int64).reshape(-1, 2).unbind(1)
    words = pack(
        causal=torch.tensor([run.causal for run in runs], dtype=torch.bool),
        document=document_ids,
        instance=island_ids,
        modalities=torch.tensor([run.bits for run in runs], dtype=torch.int64),
    )
    return words.repeat_interleave(torch.tensor([run.length for run in runs], dtype=torch.int64))


def _islands(runs: list[_TokenRun], where: str) -> list[int]:
    """Return the number of each run's island (tokens that all see each other), from 1 by first appearance; 0 for no island."""
    names: dict[str, int] = {}
    numbers, count = [], 0
    for run in runs:
        if isinstance(run.island, str) and run.island in names:
            numbers.append(names[run.island])
        elif run.island is False:
            numbers.append(0)
        else:
            count += 1
            numbers.append(count)
            if isinstance(run.island, str):
                names[run.island] = count
    if count > MAX_INSTANCE:
        raise MaskError(
            f"{where} has {count} islands (images, clips, frames); a word numbers at most {MAX_INSTANCE}: "
            "give images that may see each other one island name, or split the document"
        )
    return numbers


def _runs(part: Part, where: str) -> Iterator[_TokenRun]:
    if isinstance(part, Video):
        _check_length(part.frames, "frames", where)
        _check_length(part.tokens_per_frame, "tokens per frame", where)
        run = _TokenRun(length=part.tokens_per_frame, causal=True, bits=_bits(part.sees, where), island=True)
        yield from [run] * part.frames
        return
    _check_length(part.length, "tokens", where)
    if isinstance(part, Padding):
        yield _TokenRun(length=part.length, causal=False, bits=0)
    elif isinstance(part, Text | Prefix):
        yield _TokenRun(length=part.length, causal=True, bits=_bits(part.sees, where), island=isinstance(part, Prefix))
    else:
        bits = _ALL_MODALITIES if part.sees_earlier else _bit(part.modality, where)
        yield _TokenRun(length=part.length, causal=part.sees_earlier, bits=bits, island=part.island or True)


def _check_length(length: int, what: str, where: str) -> None:
    if length < 1:
        raise MaskError(f"{where} has {length} {what}; wanted 1 or more: leave the part out")


def _bits(sees: tuple[int, ...] | None, where: str) -> int:
    if sees is None:
        return _ALL_MODALITIES
    return sum({_bit(modality, where) for modality in (TEXT, *sees)})


def _bit(modality: int, where: str) -> int:
    if not 0 <= modality < NUM_MODALITIES:
        raise MaskError(f"{where} names modality {modality}; a word has bits for 0..{NUM_MODALITIES - 1} (0 is text)")
    return 1 << modality
