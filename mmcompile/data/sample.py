"""`SampleShape`: one sample as numbers; nothing of its content."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShape:
    """How much of each modality a sample has."""

    name: str
    """Names it in reports: a file, a line, an id."""
    text_tokens: int
    """Tokens of text alone; placeholders of images and sounds are not counted."""
    images: tuple[int, ...] = ()
    """Patches of each image, as the encoder sees them (rows of its input, before any merging)."""
    audios: tuple[int, ...] = ()
    """Frames of each sound, as the encoder sees them (rows of its attention)."""

    @property
    def patches(self) -> int:
        return sum(self.images)

    @property
    def frames(self) -> int:
        return sum(self.audios)
