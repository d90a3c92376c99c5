"""Triton kernels of the forward pass of bitfield attention. Import this module only where Triton is installed.

One program attends BLOCK_M queries of one head to the tiles of one work item, the three tile classes in turn:

    FULL     scores as they are
    ROW      a query sees all keys of the tile or none: one test a query, against the first key
    GENERAL  visible = causal term or island term, of `words`, a handful of integer operations a score

Mask words, one per token, come as two int32, as integer units are 32 bits wide: the modality bits, and C (sign bit; set if the
token sees earlier ones), DOC (document, 0 for padding) and INST (island, 0 for none: tokens, as of one image, that see each
other in both directions). `query_facts` and `key_facts` unpack them so that a tile needs few comparisons:

    query  bits    modality bits, 0 unless C         document  DOC             scope  DOC << 16 | INST
    key    bits    modality bits                     document  DOC, -1 for 0   scope  DOC << 16 | INST, -1 if either is 0

Exponentials are base 2, of scores times scale log2(e). The running maximum is subtracted from scores, with two exceptions:
0 for a query that has seen no key, whose maximum is -inf; and +inf for a query that sees no key of a ROW tile, so that its
weights are 0. Values of padding are zeroed, so that infinities in them reach no sum.
"""

# Kernels are written in Triton's language: arguments have no Python types, and `if` on a constant binds names in one branch.
# pyright: basic
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl

FULL = tl.constexpr(0)
ROW = tl.constexpr(1)
GENERAL = tl.constexpr(2)
_LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)

SIZES = ["q_len", "padded_len", "sequences", "kv_len", "q_blocks", "kv_blocks", "heads", "group", "window"]
"""Names of kernel arguments that change from call to call; Triton must not compile a kernel anew for each value of them."""


@triton.jit
def query_facts(words, positions, rows, length):
    """Load per query (modality bits, document, document << 16 | island, position); rows from `length` on are padding."""
    inside = rows < length
    low = tl.load(words + 2 * rows, mask=inside, other=0)
    high = tl.load(words + 2 * rows + 1, mask=inside, other=0)
    position = tl.load(positions + rows, mask=inside, other=0).to(tl.int32)
    return tl.where(high < 0, low, 0), (high >> 16) & 0x7FFF, high & 0x7FFFFFFF, position


@triton.jit
def key_facts(words, positions, rows, length):
    """Load per key (modality bits, document, document << 16 | island, position); document is -1 for padding.

    Tokens with the same island number see each other in both directions. Rows from `length` on are padding.
    """
    inside = rows < length
    low = tl.load(words + 2 * rows, mask=inside, other=0)
    high = tl.load(words + 2 * rows + 1, mask=inside, other=0)
    position = tl.load(positions + rows, mask=inside, other=0).to(tl.int32)
    document = (high >> 16) & 0x7FFF
    island = (high & 0xFFFF) != 0
    scope = tl.where(island & (document != 0), high & 0x7FFFFFFF, -1)
    return low, tl.where(document != 0, document, -1), scope, position


@triton.jit
def _visit(
    acc, total, top, query, keys, values, words, positions, kv_words, kv_positions, other,
    begin, end, rows, batch, kv_head, q_len, kv_len, scale, window,
    KIND: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the key tiles `other[begin:end]`, which all have tile class KIND, to a query block's running softmax sums."""
    PARTS: tl.constexpr = BLOCK_KV // BLOCK_N
    if KIND != FULL:
        bits, document, scope, position = query_facts(words, positions, rows, q_len)
    last = end * PARTS - 1
    tile = tl.load(other + begin, mask=begin < end, other=0)
    for index in tl.range(begin * PARTS, end * PARTS, num_stages=STAGES):
        start = tile * BLOCK_KV + index % PARTS * BLOCK_N
        # The next tile is read here: its keys are on their way long before this one's are used up.
        tile = tl.load(other + tl.minimum(index + 1, last) // PARTS)
        if KIND == GENERAL:
            columns = start + tl.arange(0, BLOCK_N)
            key_bits, key_document, key_scope, key_position = key_facts(kv_words, kv_positions, columns, kv_len)
        key = keys.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        value = values.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        if KIND == GENERAL:
            value = tl.where((key_document >= 0)[:, None], value, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if KIND == GENERAL:
            causal = (position[:, None] >= key_position[None, :]) & ((bits[:, None] & key_bits[None, :]) != 0)
            if WINDOW:
                causal = causal & (position[:, None] - key_position[None, :] < window)
            visible = (document[:, None] == key_document[None, :]) & causal | (scope[:, None] == key_scope[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        best = tl.max(scores, 1) * scale
        if KIND == ROW:
            first_bits, first_document, first_scope, first_position = key_facts(kv_words, kv_positions, start, kv_len)
            causal = (position >= first_position) & ((bits & first_bits) != 0)
            if WINDOW:
                causal = causal & (position - first_position < window)
            sees = (document == first_document) & causal | (scope == first_scope)
            best = tl.where(sees, best, float("-inf"))
        best = tl.maximum(top, best)
        shift = best
        fade = best
        if KIND == ROW:
            shift = tl.where(sees, best, float("inf"))
        if KIND != FULL:
            fade = tl.where(best == float("-inf"), 0.0, best)
        if KIND == GENERAL:
            shift = fade
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(top - fade)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
        top = best
    return acc, total, top


@triton.jit(do_not_specialize=SIZES)
def attend(
    q, k, v, k_general, v_general, out, lse, partial_out, partial_lse,
    words, positions, kv_words, kv_positions, items, other,
    q_len, kv_len, q_blocks, heads, group, scale, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute output O and log-sum-exp L of BLOCK_M queries of one head.

    A work item whose slot is not -1 writes its result, in float32, to this slot of `partial_out` and `partial_lse`.

    Grid: items x (BLOCK_Q / BLOCK_M) x heads, in one dimension, heads fastest.
    """
    program = tl.program_id(0)
    head = program % heads
    part = program // heads % (BLOCK_Q // BLOCK_M)
    item = items + program // heads // (BLOCK_Q // BLOCK_M) * 8
    row = tl.load(item)
    slot = tl.load(item + 1)
    batch = row // q_blocks
    kv_head = head // group
    within = part * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row % q_blocks * BLOCK_Q + within
    offsets_d = tl.arange(0, BLOCK_D)
    real = (rows < q_len)[:, None] & (offsets_d < HEAD_DIM)[None, :]
    query = q.load([batch, head, row % q_blocks * BLOCK_Q + part * BLOCK_M, 0]).reshape(BLOCK_M, BLOCK_D)
    words += batch.to(tl.int64) * q_len * 2
    positions += batch.to(tl.int64) * q_len
    kv_words += batch.to(tl.int64) * kv_len * 2
    kv_positions += batch.to(tl.int64) * kv_len
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for kind in tl.static_range(3):
        acc, total, top = _visit(
            acc, total, top, query, k_general if kind == GENERAL else k, v_general if kind == GENERAL else v,
            words, positions, kv_words, kv_positions, other, tl.load(item + 2 + 2 * kind), tl.load(item + 3 + 2 * kind),
            rows, batch, kv_head, q_len, kv_len, scale * LOG2E, window,
            kind, BLOCK_D, BLOCK_G if kind == GENERAL else BLOCK_N, BLOCK_KV, STAGES, WINDOW, PRECISION,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    top = (top + tl.log2(total)) * _LN2
    if slot < 0:
        flat_rows = (batch.to(tl.int64) * heads + head) * q_len + rows
        tl.store(out + flat_rows[:, None] * HEAD_DIM + offsets_d[None, :], acc.to(out.dtype.element_ty), mask=real)
        tl.store(lse + flat_rows, top, mask=rows < q_len)
    else:
        slot_rows = (slot.to(tl.int64) * heads + head) * BLOCK_Q + within
        wide = (offsets_d < HEAD_DIM)[None, :]
        tl.store(partial_out + slot_rows[:, None] * HEAD_DIM + offsets_d[None, :], acc, mask=wide)
        tl.store(partial_lse + slot_rows, top)


@triton.jit(do_not_specialize=SIZES)
def merge(
    partial_out, partial_lse, splits, out, lse, q_len, q_blocks, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Merge the partial results s of a query block whose tiles are split over several work items, in slot order.

    O = sum exp(L_s - M) O_s / sum exp(L_s - M), with M = max L_s.

    Grid: splits x (BLOCK_Q / BLOCK_M) x heads, in one dimension, heads fastest.
    """
    program = tl.program_id(0)
    head = program % heads
    part = program // heads % (BLOCK_Q // BLOCK_M)
    split = splits + program // heads // (BLOCK_Q // BLOCK_M) * 3
    row = tl.load(split)
    first = tl.load(split + 1)
    end = tl.load(split + 2)
    within = part * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row % q_blocks * BLOCK_Q + within
    offsets_d = tl.arange(0, BLOCK_D)
    wide = (offsets_d < HEAD_DIM)[None, :]
    first_rows = (first.to(tl.int64) * heads + head) * BLOCK_Q + within
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for index in range(end - first):
        slot_rows = first_rows + index * heads * BLOCK_Q
        top = tl.maximum(top, tl.load(partial_lse + slot_rows))
    shift = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for index in range(end - first):
        slot_rows = first_rows + index * heads * BLOCK_Q
        weight = tl.exp(tl.load(partial_lse + slot_rows) - shift)
        total += weight
        partial = tl.load(partial_out + slot_rows[:, None] * HEAD_DIM + offsets_d[None, :], mask=wide, other=0.0)
        acc += weight[:, None] * partial
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    flat_rows = ((row // q_blocks).to(tl.int64) * heads + head) * q_len + rows
    real = (rows < q_len)[:, None] & wide
    acc = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + flat_rows[:, None] * HEAD_DIM + offsets_d[None, :], acc, mask=real)
    top = tl.where(empty, float("-inf"), shift + tl.log(total))
    tl.store(lse + flat_rows, top, mask=rows < q_len)
