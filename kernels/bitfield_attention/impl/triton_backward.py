"""Triton kernels of the backward pass of bitfield attention. Import this module only where Triton is installed.

With L the natural log-sum-exp of a row, delta_i = O_i . dO_i - dL_i and P_ij = exp(scale q_i . k_j - L_i):

    dV = P^T dO     dS = P * (dO V^T - delta)     dQ = scale dS K     dK = scale dS^T Q

Two kernels compute the scores again: `query_gradients` sums over the keys of a block of queries, `key_gradients` over
the queries of a block of keys, looping over the query heads that share its key head. Nothing is added atomically, so
results repeat bit by bit. Tile classes, and how mask words (one per token) are stored and read, are those of `triton_forward`.

`prepare` writes L in base 2, +inf for rows that see nothing: every weight of such a row is exp(-inf) = 0 without a test.
"""

# Kernels are written in Triton's language: arguments have no Python types, and `if` on a constant binds names in one branch.
# pyright: basic
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOptionalOperand=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.kernels.bitfield_attention.impl.triton_forward import (
    FULL,
    GENERAL,
    LOG2E,
    ROW,
    SIZES,
    key_facts,
    query_facts,
)


@triton.jit(do_not_specialize=SIZES)
def prepare(
    out, dout, lse, dlse, shift, delta,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_ot: tl.int64, stride_gb: tl.int64, stride_gh: tl.int64, stride_gt: tl.int64,
    q_len, padded_len, sequences, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute `delta`, and the log-sum-exp L in base 2 as `shift`, of BLOCK_M queries of one head; `shift` of padding is +inf.

    Grid: blocks x sequences (batch x heads), in one dimension.
    """
    flat = tl.program_id(0) % sequences
    batch = flat // heads
    head = flat % heads
    rows = tl.program_id(0) // sequences * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_d = tl.arange(0, BLOCK_D)
    inside = rows < q_len
    real = inside[:, None] & (offsets_d < HEAD_DIM)[None, :]
    o_tile = out + batch * stride_ob + head * stride_oh + rows[:, None] * stride_ot + offsets_d[None, :]
    g_tile = dout + batch * stride_gb + head * stride_gh + rows[:, None] * stride_gt + offsets_d[None, :]
    flat_rows = flat.to(tl.int64) * q_len + rows
    sums = tl.load(lse + flat_rows, mask=inside, other=float("-inf"))
    empty = sums == float("-inf")
    o = tl.load(o_tile, mask=real, other=0.0).to(tl.float32)
    g = tl.load(g_tile, mask=real & (sums > float("-inf"))[:, None], other=0.0).to(tl.float32)
    product = tl.sum(o * g, 1)
    if dlse is not None:
        product -= tl.where(empty, 0.0, tl.load(dlse + flat_rows, mask=inside, other=0.0))
    padded_rows = flat.to(tl.int64) * padded_len + rows
    tl.store(delta + padded_rows, product)
    tl.store(shift + padded_rows, tl.where(empty, float("inf"), sums * LOG2E))


@triton.jit
def _visit_keys(
    acc, query, dout, shift, delta, keys, values, words, positions, kv_words, kv_positions, other,
    begin, end, rows, batch, kv_head, q_len, kv_len, scale, window,
    KIND: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K of the key tiles `other[begin:end]`, which all have tile class KIND, to `acc`, the gradient of a query block."""
    PARTS: tl.constexpr = BLOCK_KV // BLOCK_N
    if KIND != FULL:
        bits, document, scope, position = query_facts(words, positions, rows, q_len)
    last = end * PARTS - 1
    tile = tl.load(other + begin, mask=begin < end, other=0)
    for index in tl.range(begin * PARTS, end * PARTS, num_stages=STAGES):
        start = tile * BLOCK_KV + index % PARTS * BLOCK_N
        tile = tl.load(other + tl.minimum(index + 1, last) // PARTS)
        if KIND == GENERAL:
            columns = start + tl.arange(0, BLOCK_N)
            key_bits, key_document, key_scope, key_position = key_facts(kv_words, kv_positions, columns, kv_len)
        key = keys.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        value = values.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        if KIND == GENERAL:
            key = tl.where((key_document >= 0)[:, None], key, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        tile_shift = shift
        if KIND == ROW:
            first_bits, first_document, first_scope, first_position = key_facts(kv_words, kv_positions, start, kv_len)
            causal = (position >= first_position) & ((bits & first_bits) != 0)
            if WINDOW:
                causal = causal & (position - first_position < window)
            sees = (document == first_document) & causal | (scope == first_scope)
            tile_shift = tl.where(sees, shift, float("inf"))
        weights = tl.exp2(scores * scale - tile_shift[:, None])
        dweights = tl.dot(dout, tl.trans(value), input_precision=PRECISION)
        dscores = weights * (dweights - delta[:, None])
        if KIND == GENERAL:
            causal = (position[:, None] >= key_position[None, :]) & ((bits[:, None] & key_bits[None, :]) != 0)
            if WINDOW:
                causal = causal & (position[:, None] - key_position[None, :] < window)
            visible = (document[:, None] == key_document[None, :]) & causal | (scope[:, None] == key_scope[None, :])
            dscores = tl.where(visible, dscores, 0.0)
        acc = tl.dot(dscores.to(key.dtype), key, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=SIZES)
def query_gradients(
    q, dout, k, v, k_general, v_general, shift, delta, dq, partial_dq,
    words, positions, kv_words, kv_positions, items, other,
    q_len, kv_len, q_blocks, heads, group, scale, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ, contiguous, of BLOCK_M queries of one head.

    A work item whose slot is not -1 writes its sum, in float32, to this slot of `partial_dq`; `add_parts` adds the slots.

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
    inside = rows < q_len
    wide = (offsets_d < HEAD_DIM)[None, :]
    flat_rows = (batch.to(tl.int64) * heads + head) * q_len + rows
    padded_rows = (batch.to(tl.int64) * heads + head) * q_blocks * BLOCK_Q + rows
    row_shift = tl.load(shift + padded_rows)
    row_delta = tl.load(delta + padded_rows)
    start = row % q_blocks * BLOCK_Q + part * BLOCK_M
    query = q.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
    query_dout = dout.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
    words += batch.to(tl.int64) * q_len * 2
    positions += batch.to(tl.int64) * q_len
    kv_words += batch.to(tl.int64) * kv_len * 2
    kv_positions += batch.to(tl.int64) * kv_len
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for kind in tl.static_range(3):
        acc = _visit_keys(
            acc, query, query_dout, row_shift, row_delta,
            k_general if kind == GENERAL else k, v_general if kind == GENERAL else v,
            words, positions, kv_words, kv_positions, other, tl.load(item + 2 + 2 * kind), tl.load(item + 3 + 2 * kind),
            rows, batch, kv_head, q_len, kv_len, scale * LOG2E, window,
            kind, BLOCK_D, BLOCK_G if kind == GENERAL else BLOCK_N, BLOCK_KV, STAGES, WINDOW, PRECISION,
        )  # fmt: skip
    acc = tl.where((row_shift < float("inf"))[:, None], acc * scale, 0.0)
    if slot < 0:
        real = inside[:, None] & wide
        tl.store(dq + flat_rows[:, None] * HEAD_DIM + offsets_d[None, :], acc.to(dq.dtype.element_ty), mask=real)
    else:
        slot_rows = (slot.to(tl.int64) * heads + head) * BLOCK_Q + within
        tl.store(partial_dq + slot_rows[:, None] * HEAD_DIM + offsets_d[None, :], acc, mask=wide)


@triton.jit
def _visit_queries(
    dk, dv, key, value, key_rows, queries, douts, shift, delta, words, positions, kv_words, kv_positions, other,
    begin, end, batch, first_head, padded_len, q_len, kv_len, scale, window,
    KIND: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q to `dk` and P^T dO to `dv`, over the query tiles `other[begin:end]`, which all have tile class KIND."""
    PARTS: tl.constexpr = BLOCK_Q // BLOCK_M
    if KIND == ROW:
        key_bits, key_document, key_scope, key_position = key_facts(kv_words, kv_positions, tl.min(key_rows, 0), kv_len)
    if KIND == GENERAL:
        key_bits, key_document, key_scope, key_position = key_facts(kv_words, kv_positions, key_rows, kv_len)
    last = (end - begin) * PARTS * GROUP - 1
    tile = tl.load(other + begin, mask=begin < end, other=0)
    # All heads of the group in one loop, so that loads of the next head are under way when a head ends.
    for index in tl.range(0, (end - begin) * PARTS * GROUP, num_stages=STAGES):
        start = tile * BLOCK_Q + index // GROUP % PARTS * BLOCK_M
        head = first_head + index % GROUP
        tile = tl.load(other + begin + tl.minimum(index + 1, last) // (GROUP * PARTS))
        rows = start + tl.arange(0, BLOCK_M)
        padded_rows = head.to(tl.int64) * padded_len + rows
        row_shift = tl.load(shift + padded_rows)
        row_delta = tl.load(delta + padded_rows)
        if KIND != FULL:
            bits, document, scope, position = query_facts(words, positions, rows, q_len)
        query = queries.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        dout = douts.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        if KIND == GENERAL:
            query = tl.where((row_shift < float("inf"))[:, None], query, 0.0)
            if DV:
                dout = tl.where((row_shift < float("inf"))[:, None], dout, 0.0)
        if KIND == ROW:
            causal = (position >= key_position) & ((bits & key_bits) != 0)
            if WINDOW:
                causal = causal & (position - key_position < window)
            sees = (document == key_document) & causal | (scope == key_scope)
            row_shift = tl.where(sees, row_shift, float("inf"))
        # Products start from what would be subtracted from them: L and delta then hold no registers beside the scores.
        from_shift = tl.broadcast_to((row_shift * (-1.0 / scale))[None, :], [BLOCK_N, BLOCK_M])
        scores = tl.dot(key, tl.trans(query), from_shift, input_precision=PRECISION)
        weights = tl.exp2(scores * scale)
        if KIND == GENERAL:
            causal = (position[None, :] >= key_position[:, None]) & ((bits[None, :] & key_bits[:, None]) != 0)
            if WINDOW:
                causal = causal & (position[None, :] - key_position[:, None] < window)
            visible = (document[None, :] == key_document[:, None]) & causal | (scope[None, :] == key_scope[:, None])
            weights = tl.where(visible, weights, 0.0)
        if DV:
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
        if DK:
            from_delta = tl.broadcast_to(-row_delta[None, :], [BLOCK_N, BLOCK_M])
            dscores = weights * tl.dot(value, tl.trans(dout), from_delta, input_precision=PRECISION)
            if KIND == GENERAL and not DV:
                dscores = tl.where(visible, dscores, 0.0)
            dk = tl.dot(dscores.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def key_gradients(
    q, dout, q_general, dout_general, k, v, shift, delta, dk, dv, partial_dk, partial_dv,
    words, positions, kv_words, kv_positions, items, other,
    q_len, kv_len, padded_len, kv_blocks, heads, scale, window,
    DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV, contiguous, of BLOCK_N keys of one key head.

    A work item whose slot is not -1 writes its sums, in float32, to this slot of `partial_dk` and `partial_dv`.

    `heads` is the number of key heads. Grid: items x (BLOCK_KV / BLOCK_N) x heads, in one dimension, heads fastest.
    """
    program = tl.program_id(0)
    kv_head = program % heads
    part = program // heads % (BLOCK_KV // BLOCK_N)
    item = items + program // heads // (BLOCK_KV // BLOCK_N) * 8
    row = tl.load(item)
    slot = tl.load(item + 1)
    batch = row // kv_blocks
    within = part * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = row % kv_blocks * BLOCK_KV + within
    offsets_d = tl.arange(0, BLOCK_D)
    wide = (offsets_d < HEAD_DIM)[None, :]
    words += batch.to(tl.int64) * q_len * 2
    positions += batch.to(tl.int64) * q_len
    kv_words += batch.to(tl.int64) * kv_len * 2
    kv_positions += batch.to(tl.int64) * kv_len
    start = row % kv_blocks * BLOCK_KV + part * BLOCK_N
    key = k.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
    value = key
    if DK:
        value = v.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
    # A sum that is not asked for is one column wide, and never touched.
    dkey = tl.zeros([BLOCK_N, BLOCK_D if DK else 1], tl.float32)
    dvalue = tl.zeros([BLOCK_N, BLOCK_D if DV else 1], tl.float32)
    shift += batch.to(tl.int64) * heads * GROUP * padded_len
    delta += batch.to(tl.int64) * heads * GROUP * padded_len
    for kind in tl.static_range(3):
        dkey, dvalue = _visit_queries(
            dkey, dvalue, key, value, rows,
            q_general if kind == GENERAL else q, dout_general if kind == GENERAL else dout,
            shift, delta, words, positions, kv_words, kv_positions, other,
            tl.load(item + 2 + 2 * kind), tl.load(item + 3 + 2 * kind),
            batch, kv_head * GROUP, padded_len, q_len, kv_len, scale * LOG2E, window,
            kind, DK, DV, GROUP, BLOCK_D, BLOCK_G if kind == GENERAL else BLOCK_M, BLOCK_Q, BLOCK_N, STAGES, WINDOW, PRECISION,
        )  # fmt: skip
    real = ((tl.load(kv_words + 2 * rows + 1, mask=rows < kv_len, other=0) & 0x7FFF0000) != 0)[:, None]
    flat_rows = (batch.to(tl.int64) * heads + kv_head) * kv_len + rows
    slot_rows = (slot.to(tl.int64) * heads + kv_head) * BLOCK_KV + within
    inside = (rows < kv_len)[:, None] & wide
    if DK:
        dkey = tl.where(real, dkey * scale, 0.0)
        if slot < 0:
            tl.store(dk + flat_rows[:, None] * HEAD_DIM + offsets_d[None, :], dkey.to(dk.dtype.element_ty), mask=inside)
        else:
            tl.store(partial_dk + slot_rows[:, None] * HEAD_DIM + offsets_d[None, :], dkey, mask=wide)
    if DV:
        dvalue = tl.where(real, dvalue, 0.0)
        if slot < 0:
            tl.store(
                dv + flat_rows[:, None] * HEAD_DIM + offsets_d[None, :], dvalue.to(dv.dtype.element_ty), mask=inside
            )
        else:
            tl.store(partial_dv + slot_rows[:, None] * HEAD_DIM + offsets_d[None, :], dvalue, mask=wide)


@triton.jit(do_not_specialize=["length", "blocks", "heads"])
def add_parts(
    partial, splits, total, length, blocks, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write to `total` the gradients of blocks split over several work items: sums of slots of `partial`, one written by each.

    Grid: rows of `splits` (block, first slot, end slot) x (BLOCK / BLOCK_M) x heads, in one dimension, heads fastest.
    """
    program = tl.program_id(0)
    head = program % heads
    part = program // heads % (BLOCK // BLOCK_M)
    split = splits + program // heads // (BLOCK // BLOCK_M) * 3
    row = tl.load(split)
    first = tl.load(split + 1)
    end = tl.load(split + 2)
    within = part * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row % blocks * BLOCK + within
    offsets_d = tl.arange(0, BLOCK_D)
    wide = (offsets_d < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_rows = (first.to(tl.int64) * heads + head) * BLOCK + within
    for index in range(end - first):
        slot_rows = first_rows + index * heads * BLOCK
        acc += tl.load(partial + slot_rows[:, None] * HEAD_DIM + offsets_d[None, :], mask=wide, other=0.0)
    flat_rows = ((row // blocks).to(tl.int64) * heads + head) * length + rows
    inside = (rows < length)[:, None] & wide
    tl.store(total + flat_rows[:, None] * HEAD_DIM + offsets_d[None, :], acc.to(total.dtype.element_ty), mask=inside)
