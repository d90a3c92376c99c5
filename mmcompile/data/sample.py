"""`SampleShape`: the sizes of one sample, without its content."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShape:
    """Size of a sample: patches of each image, frames of each audio clip, number of text tokens."""

    name: str
    """Name of the sample in reports: a file, a line, an id."""
    text_tokens: int
    """Number of text tokens; placeholders of images and audio clips are not counted."""
    images: tuple[int, ...] = ()
    """Number of patches of each image: rows of the encoder's input, before any merging."""
    audios: tuple[int, ...] = ()
    """Number of frames of each audio clip: rows of the encoder's attention."""

    @property
    def patches(self) -> int:
        """Number of patches of all images."""
        return sum(self.images)

    @property
    def frames(self) -> int:
        """Number of frames of all audio clips."""
        return sum(self.audios)
