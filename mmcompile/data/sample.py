"""`SampleShape`: the sizes of one sample, without its content."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShape:
    """Amount of each modality in a sample."""

    name: str
    """Name of the sample in reports: a file, a line, an id."""
    text_tokens: int
    """Tokens of text alone; placeholders of images and sounds are not counted."""
    images: tuple[int, ...] = ()
    """Patches of each image, as the encoder sees them (rows of its input, before any merging)."""
    audios: tuple[int, ...] = ()
    """Frames of each sound, as the encoder sees them (rows of its attention)."""

    @property
    def patches(self) -> int:
        """Patches of all images."""
        return sum(self.images)

    @property
    def frames(self) -> int:
        """Frames of all sounds."""
        return sum(self.audios)
