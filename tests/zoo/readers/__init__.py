"""Language models that read pictures, pages or sounds, by unusual parts: nested towers, chosen experts and keys, mixed layers."""

from __future__ import annotations

from zoo.readers import audio_lm, hybrid, nested, ocr, sparse

FAMILIES = (*nested.FAMILIES, *sparse.FAMILIES, *ocr.FAMILIES, *hybrid.FAMILIES, *audio_lm.FAMILIES)
