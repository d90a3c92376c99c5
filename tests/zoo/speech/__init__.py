"""Models of speech and music: a token a frame, transcripts, sound from text."""

from __future__ import annotations

from zoo.speech import frames, to_sound, to_text

FAMILIES = (*frames.FAMILIES, *to_text.FAMILIES, *to_sound.FAMILIES)
