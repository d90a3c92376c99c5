"""Classes of the tiles of a mask (EMPTY, FULL, ROW, GENERAL), derived from summaries of blocks of words.

No [Tq, Tk] mask is made; a class takes a quarter of a byte.

Classes are conservative: an EMPTY tile hides all pairs, a FULL tile shows all pairs and a ROW tile is uniform along
each row, but a GENERAL tile may turn out to be any of them. Pairs of superblocks of 8 blocks are classed first; only
those neither EMPTY nor FULL are refined, by query block and then by key block. All of this runs in NumPy on the CPU,
also for words on other devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.words import MAX_DOCUMENT, MAX_INSTANCE

BLOCK = 128
"""Number of tokens in a block of queries or keys, by default."""
_SUPERBLOCK = 8
"""Number of blocks in a superblock; their eight 2-bit classes fill 16 bits."""

_PAIRS_AT_ONCE = 1 << 18
_FAR = np.iinfo(np.int32).max

Summaries = dict[str, np.ndarray]
"""Summary name, as `first_document` -> its value for each block, int32 [batch, blocks]. Islands are document << 16 | island."""

_REDUCTIONS: dict[str, np.ufunc] = {
    "least_document": np.minimum,  # 0 if a token is padding
    "first_document": np.minimum,
    "last_document": np.maximum,
    "least_island": np.minimum,  # 0 if a token is in none
    "first_island": np.minimum,
    "last_island": np.maximum,
    "begin": np.minimum,  # positions of tokens that are not padding
    "end": np.maximum,
    "causal_begin": np.minimum,  # positions of causal tokens
    "causal_end": np.maximum,
    "all_causal": np.minimum,
    "all_bits": np.minimum,  # 0 if a token has no modality bit
    "any_of": np.bitwise_or,  # modality bits
    "each_of": np.bitwise_and,
    "causal_any_of": np.bitwise_or,
    "causal_each_of": np.bitwise_and,
}


class TileClass(IntEnum):
    """Visible part of a tile: none (EMPTY), some rows (ROW), all (FULL), or mixed (GENERAL)."""

    EMPTY = 0
    FULL = 1
    ROW = 2
    """Each query sees all keys of the tile or none: one document, no padding, every key before every query."""
    GENERAL = 3


def check_arguments(
    words: torch.Tensor,
    positions: torch.Tensor | None,
    kv_words: torch.Tensor | None,
    kv_positions: torch.Tensor | None,
    window: int | None,
) -> None:
    """Raise MaskError unless the arguments have the dtypes and shapes of mask words and positions."""
    for name, x in (("words", words), ("kv_words", kv_words)):
        if x is not None and (x.dtype != torch.int64 or x.ndim != 2 or x.shape[0] != words.shape[0] or not x.shape[1]):
            raise MaskError(
                f"{name} are {x.dtype} {list(x.shape)}; wanted int64 [batch, tokens], the batch of queries and keys alike: "
                "build them with build_mask or words_from_ids"
            )
    for name, x, of in (("positions", positions, words), ("kv_positions", kv_positions, kv_words)):
        of = words if of is None else of
        if x is not None and (x.dtype not in (torch.int32, torch.int64) or x.shape != of.shape):
            raise MaskError(f"{name} are {x.dtype} {list(x.shape)}; wanted int32 {list(of.shape)}, one for each word")
    if positions is not None and kv_words is not None and kv_positions is None:
        raise MaskError("positions are given for queries but not for keys: give kv_positions with kv_words")
    if window is not None and window < 1:
        raise MaskError(f"a window of {window} tokens hides everything; wanted 1 or more, or None for no window")


def unpack_classes(packed: np.ndarray) -> np.ndarray:
    """Return tile classes, uint8 [..., 4 * bytes], from the packed bytes of `Masks.packed`, uint8 [..., bytes]."""
    return _UNPACKED[packed].view(np.uint8)


_UNPACKED = (
    np.stack([np.arange(256) >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).astype(np.uint8).view(np.uint32)[:, 0]
)
_COUNTS = np.count_nonzero(_UNPACKED[:, None].view(np.uint8), axis=-1).astype(np.uint8)
# A superblock of one class, by class.
_UNIFORM = np.array([0x0000, 0x5555, 0xAAAA, 0xFFFF], dtype=np.uint16)


class Masks:
    """Classifies the tiles of a batch of masks, by summaries of the blocks of queries and keys.

    Args:
        words: [batch, Tq] int64. positions: [batch, Tq] integer, or None for 0, 1, 2, ...
        kv_words, kv_positions: words and positions of the keys, [batch, Tk]; None for those of the queries.
        window: reach of the causal term in tokens, or None.
        block_q, block_kv: number of tokens in a block; tokens past the end of a sequence count as padding.

    Raises:
        MaskError: words or positions of a wrong dtype or shape.
    """

    def __init__(
        self,
        words: torch.Tensor,
        positions: torch.Tensor | None = None,
        kv_words: torch.Tensor | None = None,
        kv_positions: torch.Tensor | None = None,
        *,
        window: int | None = None,
        block_q: int = BLOCK,
        block_kv: int = BLOCK,
    ) -> None:
        check_arguments(words, positions, kv_words, kv_positions, window)
        same = kv_words is None and kv_positions is None
        if kv_words is None:
            kv_words, kv_positions = words, positions if kv_positions is None else kv_positions
        of_queries = _summarise(words, positions, block_q)
        of_keys = of_queries if same and block_q == block_kv else _summarise(kv_words, kv_positions, block_kv)
        self.batch, self.q_len, self.kv_len = *words.shape, kv_words.shape[1]
        self.blocks_q, self.blocks_kv = -(-self.q_len // block_q), -(-self.kv_len // block_kv)
        self.window = None if window is None else min(window, _FAR)
        self.queries, self.keys = _flat(_as_queries(of_queries)), _flat(_as_keys(of_keys))
        self.super_queries = _as_queries(_reduced(of_queries, _SUPERBLOCK))
        self.super_keys = _as_keys(_reduced(of_keys, _SUPERBLOCK))

    def packed(self) -> np.ndarray:
        """Return the classes of all tiles, two bits each: 16 MiB for 2^20 tokens in blocks of 128.

        Returns:
            uint8 [batch, query blocks, bytes]; the class of key block j is in bits 2 (j mod 4) of byte j // 4, and the
            last bytes are filled with EMPTY up to a whole superblock. `unpack_classes` reads it.
        """
        return np.concatenate(list(self._chunks()), axis=1)[:, : self.blocks_q]

    def workload(self) -> np.ndarray:
        """Return the number of tiles that every query block visits, int64 [batch, query blocks]."""
        counts = [_COUNTS[chunk].sum(-1, dtype=np.int64) for chunk in self._chunks()]
        return np.concatenate(counts, axis=1)[:, : self.blocks_q]

    def _chunks(self) -> Iterator[np.ndarray]:
        batch, rows = self.super_queries["begin"].shape
        columns = self.super_keys["begin"].shape[1]
        step = max(1, _PAIRS_AT_ONCE // (batch * columns))
        for first in range(0, rows, step):
            yield self._chunk(first, min(first + step, rows))

    def _chunk(self, first: int, last: int) -> np.ndarray:
        queries = {name: x[:, first:last, None] for name, x in self.super_queries.items()}
        keys = {name: x[:, None, :] for name, x in self.super_keys.items()}
        classes = _classify(queries, keys, self.window)
        packed = np.repeat(_UNIFORM[classes], _SUPERBLOCK, axis=1)
        self._refine_queries(packed, np.nonzero(classes >= TileClass.ROW), first)
        return packed.view(np.uint8)

    def _refine_queries(self, packed: np.ndarray, pairs: tuple[np.ndarray, ...], first: int) -> None:
        """Classify each query block of superblock pairs with the superblock of keys; refine what is still GENERAL by key block.

        Args:
            packed: classes, uint16 [batch, query blocks, key superblocks], eight 2-bit classes each, written in place.
            pairs: three index arrays: batch row, query superblock (counted from `first`), key superblock.
            first: index of the first query superblock in `packed`.
        """
        row, query, key = pairs
        if not row.size:
            return
        blocks = (query + first + row * self.super_queries["begin"].shape[1]) * _SUPERBLOCK + _EIGHT
        supers = row * self.super_keys["begin"].shape[1] + key
        classes = _classify(_at(self.queries, blocks), _at(_flat(self.super_keys), supers), self.window)
        rows = query * _SUPERBLOCK + _EIGHT
        packed[row, rows, key] = _UNIFORM[classes]
        general = classes == TileClass.GENERAL
        places = (np.broadcast_to(x, classes.shape)[general] for x in (row, rows, key))
        self._refine_keys(packed, tuple(places), blocks[general], np.broadcast_to(supers, classes.shape)[general])

    def _refine_keys(
        self, packed: np.ndarray, places: tuple[np.ndarray, ...], blocks: np.ndarray, supers: np.ndarray
    ) -> None:
        """Classify the tiles of a query block with each of the eight key blocks of a superblock, for many such places.

        Args:
            packed: classes, uint16 [batch, query blocks, key superblocks], eight 2-bit classes each, written in place.
            places: three index arrays into `packed`: batch row, query block, key superblock.
            blocks: index of the query block of each place among the blocks of all batch rows.
            supers: index of the key superblock of each place among those of all batch rows.
        """
        for first in range(0, len(blocks), _PAIRS_AT_ONCE // _SUPERBLOCK):
            piece = slice(first, first + _PAIRS_AT_ONCE // _SUPERBLOCK)
            queries, keys = _at(self.queries, blocks[piece]), _at(self.keys, supers[piece] * _SUPERBLOCK + _EIGHT)
            classes = _classify(queries, keys, self.window).astype(np.uint16) << 2 * _EIGHT.astype(np.uint16)
            packed[tuple(x[piece] for x in places)] = np.bitwise_or.reduce(classes, axis=0)


_EIGHT = np.arange(_SUPERBLOCK)[:, None]


def _classify(queries: Summaries, keys: Summaries, window: int | None) -> np.ndarray:
    """Return the `TileClass` of pairs of a query block and a key block, uint8; GENERAL where their summaries cannot decide it."""
    islands = (queries["first_island"] <= keys["last_island"]) & (keys["first_island"] <= queries["last_island"])
    some = (queries["first_document"] <= keys["last_document"]) & (keys["first_document"] <= queries["last_document"])
    some &= (queries["causal_any_of"] & keys["any_of"]) != 0
    some &= keys["begin"] <= queries["causal_end"]
    before = queries["document"] == keys["document"]
    before &= keys["last"] <= queries["begin"]
    if window is not None:
        some &= queries["causal_begin"] - window < keys["end"]
        before &= queries["end"] - window < keys["begin"]
    # Every causal query meets every key: all share a bit, or a query reads all bits the keys have.
    meet = (queries["causal_each_of"] & keys["each_of"]) != 0
    meet |= (keys["any_of"] & ~queries["causal_each_of"]) == 0
    full = before & meet & queries["all_causal"]
    full |= queries["island"] == keys["island"]
    # Or the keys are alike in all bits queries read, so that a query meets all or none.
    alike = (keys["mixed"] & queries["causal_any_of"]) == 0
    row = before & (meet | alike) & ~islands
    classes = np.where(row, np.uint8(TileClass.ROW), np.uint8(TileClass.GENERAL))
    classes[full] = TileClass.FULL
    classes[~(some | islands)] = TileClass.EMPTY
    return classes


def _as_queries(blocks: Summaries) -> Summaries:
    # A block with several documents (or islands) has id 0 here and -1 as keys, so that it equals no other block.
    taken = ("first_document", "last_document", "first_island", "last_island", "begin", "end")
    causal = ("causal_begin", "causal_end", "causal_any_of", "causal_each_of")
    return {name: blocks[name] for name in (*taken, *causal)} | {
        "document": np.where(blocks["least_document"] == blocks["last_document"], blocks["last_document"], 0),
        "island": np.where(blocks["least_island"] == blocks["last_island"], blocks["last_island"], 0),
        "all_causal": blocks["all_causal"] != 0,
    }


def _as_keys(blocks: Summaries) -> Summaries:
    one_document = (blocks["least_document"] == blocks["last_document"]) & (blocks["last_document"] != 0)
    one_island = (blocks["least_island"] == blocks["last_island"]) & (blocks["last_island"] != 0)
    taken = ("first_document", "last_document", "first_island", "last_island", "begin", "end", "any_of", "each_of")
    return {name: blocks[name] for name in taken} | {
        "document": np.where(one_document, blocks["last_document"], -1),
        "island": np.where(one_island, blocks["last_island"], -1),
        "last": np.where(blocks["all_bits"] != 0, blocks["end"], _FAR),
        "mixed": blocks["any_of"] ^ blocks["each_of"],
    }


def _summarise(words: torch.Tensor, positions: torch.Tensor | None, block: int) -> Summaries:
    if positions is None:
        positions = torch.arange(words.shape[1]).expand(words.shape)
    word, position = _padded(words, block), _padded(positions.to(torch.int32), block)
    document = (word >> 48).astype(np.int32) & MAX_DOCUMENT
    real = document != 0
    island = (word >> 32).astype(np.int32) & ((MAX_DOCUMENT << 16) | MAX_INSTANCE)
    island = np.where(real & ((island & MAX_INSTANCE) != 0), island, 0)
    bits = np.where(real, word.astype(np.int32), 0)  # the cast keeps the low half
    causal = (word < 0) & real
    tokens = {
        "least_document": document,
        "first_document": np.where(real, document, _FAR),
        "last_document": document,
        "least_island": island,
        "first_island": np.where(island != 0, island, _FAR),
        "last_island": island,
        "begin": np.where(real, position, _FAR),
        "end": np.where(real, position, -1),
        "causal_begin": np.where(causal, position, _FAR),
        "causal_end": np.where(causal, position, -1),
        "all_causal": causal.view(np.uint8),
        "all_bits": (bits != 0).view(np.uint8),
        "any_of": bits,
        "each_of": bits,
        "causal_any_of": np.where(causal, bits, 0),
        "causal_each_of": np.where(causal, bits, -1),
    }
    return _reduced(tokens, block)


def _reduced(values: Summaries, size: int) -> Summaries:
    """Combine the summaries of every `size` adjacent blocks (or tokens) into the summary of the larger block they form."""
    return {name: _REDUCTIONS[name].reduce(x.reshape(len(x), -1, size), axis=-1) for name, x in values.items()}


def _padded(x: torch.Tensor, block: int) -> np.ndarray:
    """Return `x` [batch, tokens] as an array, with zeros appended up to a multiple of 8 blocks of `block` tokens each."""
    return np.pad(x.cpu().numpy(), ((0, 0), (0, -x.shape[1] % (block * _SUPERBLOCK))))


def _flat(blocks: Summaries) -> Summaries:
    return {name: x.reshape(-1) for name, x in blocks.items()}


def _at(blocks: Summaries, index: np.ndarray) -> Summaries:
    return {name: x[index] for name, x in blocks.items()}
