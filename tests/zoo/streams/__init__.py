"""Streams of microbatches that all differ, made by each family's own processor from pictures, sounds and text."""

from __future__ import annotations

from zoo.streams.batches import STREAM_FAMILIES, stream

__all__ = ["STREAM_FAMILIES", "stream"]
