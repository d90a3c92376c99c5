"""Text beside a picture, a page, a video or a sound: models that compare the two, or that read one with the other."""

from __future__ import annotations

from zoo.pairs import contrastive, documents, fused, regions

FAMILIES = (*contrastive.FAMILIES, *fused.FAMILIES, *documents.FAMILIES, *regions.FAMILIES)
