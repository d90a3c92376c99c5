"""Conversion of ids per token into the words of a mask, and a check of words."""

from __future__ import annotations

import torch

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.words import (
    MAX_DOCUMENT,
    MAX_INSTANCE,
    NUM_MODALITIES,
    PADDING,
    document,
    pack,
)


def words_from_ids(
    documents: torch.Tensor,
    islands: torch.Tensor | None = None,
    *,
    causal: bool | torch.Tensor = True,
    modalities: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the words of a mask in which tokens see earlier tokens and their island, within their document.

    That is (causal or same island) and same document, as model libraries compose masks.

    Args:
        documents: integer [batch, tokens]; 0 is padding.
        islands: integer [batch, tokens], bidirectional block of each token; 0 or less is none.
        causal: True if tokens see earlier ones; one value for all tokens, or bool [batch, tokens].
        modalities: integer [batch, tokens] of modality bits, or None if modalities do not restrict the mask.

    Returns:
        int64 [batch, tokens] on the device of `documents`.

    Raises:
        MaskError: an id, or a dtype or shape, that a word cannot hold.
    """
    islands = torch.zeros_like(documents) if islands is None else islands
    modalities = torch.ones_like(documents) if modalities is None else modalities
    if not isinstance(causal, torch.Tensor):
        causal = torch.full_like(documents, causal, dtype=torch.bool)
    fields = {"documents": documents, "islands": islands, "modalities": modalities, "causal": causal}
    for name, x in fields.items():
        wanted = "bool" if name == "causal" else "an integer type"
        right = x.dtype == torch.bool if name == "causal" else not (x.is_floating_point() or x.dtype == torch.bool)
        if not right or x.shape != documents.shape or x.ndim != 2:
            raise MaskError(
                f"{name} are {x.dtype} {list(x.shape)}; wanted {wanted} [batch, tokens], all of the shape of documents"
            )
    _check_range("document ids", documents, MAX_DOCUMENT, "number the documents of each row from 1 (0 is padding)")
    islands = islands.clamp(min=0)
    _check_range("island ids", islands, MAX_INSTANCE, "number the islands of each document from 1")
    _check_range("modality bits", modalities, (1 << NUM_MODALITIES) - 1, f"use bits 0..{NUM_MODALITIES - 1}")
    return pack(causal=causal, document=documents.long(), instance=islands.long(), modalities=modalities.long())


def check_words(words: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise MaskError unless the words and positions are those of whole sequences in their original order.

    Positions count tokens, so inside a document they must increase. Check a batch before it is permuted, not after.

    Args:
        words: int64 [batch, tokens]. positions: integer [batch, tokens].
    """
    if words.dtype != torch.int64 or words.ndim != 2:
        raise MaskError(f"words are {words.dtype} {list(words.shape)}; wanted int64 [batch, tokens]")
    if positions.dtype != torch.int32 or positions.shape != words.shape:
        raise MaskError(f"positions are {positions.dtype} {list(positions.shape)}; wanted int32 {list(words.shape)}")
    documents = document(words)
    odd = ((documents == 0) & (words != PADDING)).nonzero()
    if len(odd):
        row, token = odd[0].tolist()
        raise MaskError(f"row {row}, token {token} is of document 0, which is padding, but its word is not {PADDING}")
    ordered, order = documents.sort(dim=1, stable=True)
    places = positions.gather(1, order)
    steps = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0) & (places[:, 1:] <= places[:, :-1])
    wrong = steps.nonzero()
    if len(wrong):
        row, index = wrong[0].tolist()
        first, second = order[row, index : index + 2].tolist()
        raise MaskError(
            f"row {row}, document {int(ordered[row, index])}: token {second} has position {int(places[row, index + 1])} after "
            f"token {first} with {int(places[row, index])}; wanted increasing positions: count tokens, not rotary positions"
        )
    if len(negative := ((positions < 0) & (documents != 0)).nonzero()):
        row, token = negative[0].tolist()
        raise MaskError(f"row {row}, token {token} has position {int(positions[row, token])}; wanted 0 or more")


def _check_range(what: str, x: torch.Tensor, most: int, hint: str) -> None:
    wrong = ((x < 0) | (x > most)).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise MaskError(f"{what}: row {row}, token {token} has {int(x[row, token])}; wanted 0..{most}: {hint}")
