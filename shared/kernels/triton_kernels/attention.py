"""Attention over token slots with an online softmax (FlashAttention, arXiv:2205.14135), sums in float32.

KV is gathered slot by slot through the page table of `shared.kernels.paged`; a pool is contiguous
`[slots, 2, kv_heads, D]`.  Scores are kept as powers of two, `scale` holds the factor log2(e) for that.
`UPCAST` is for Triton's interpreter, which multiplies the bits of bfloat16 as if they were integers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_block(
    q, acc, peak, total, pool, kv_indices, kv_begin, first, end, positions, scale, window, kv_head, slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of keys from `first` on: the running output, largest score and sum of weights of each query."""
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    slots = tl.load(kv_indices + kv_begin + n, mask=n < end, other=0).to(tl.int64)
    cells = pool + slots[:, None] * slot_stride + kv_head * HEAD_DIM + d[None, :]
    present = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
    keys = tl.load(cells, mask=present, other=0.0)
    if UPCAST:
        keys = keys.to(tl.float32)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    seen = (n[None, :] < end) & (n[None, :] <= positions[:, None]) & (n[None, :] > positions[:, None] - window)
    scores = tl.where(seen, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # A query that has seen no key yet has a peak of minus infinity, from which nothing can be taken off.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    faded = tl.exp2(peak - base)
    values = tl.load(cells + slot_stride // 2, mask=present, other=0.0)
    rounded = weights.to(values.dtype)
    if UPCAST:
        rounded, values = rounded.to(tl.float32), values.to(tl.float32)
    acc = acc * faded[:, None] + tl.dot(rounded, values, input_precision="ieee")
    return acc, new_peak, total * faded + tl.sum(weights, axis=1)


@triton.jit
def extend_attention(
    q, pool, out, tile_request, tile_first, qo_indptr, kv_indptr, kv_indices, scale, window,
    q_token_stride, q_head_stride, out_token_stride, slot_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile, head): `BLOCK_M` new tokens of one request, from its `tile_first`-th on."""
    tile, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tile_request + tile)
    q_begin = tl.load(qo_indptr + request)
    num_new = tl.load(qo_indptr + request + 1) - q_begin
    kv_begin = tl.load(kv_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - kv_begin

    first_row = tl.load(tile_first + tile)
    rows = first_row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    present = (rows < num_new)[:, None] & (d < HEAD_DIM)[None, :]
    tokens = (q_begin + rows).to(tl.int64)[:, None]
    queries = tl.load(q + tokens * q_token_stride + head * q_head_stride + d[None, :], mask=present, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    positions = kv_len - num_new + rows
    end = tl.minimum(kv_len, kv_len - num_new + first_row + BLOCK_M)
    begin = tl.maximum(0, kv_len - num_new + first_row - window + 1) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(begin, end, BLOCK_N):
        acc, peak, total = _attend_block(
            queries, acc, peak, total, pool, kv_indices, kv_begin, first, end, positions, scale, window,
            head // GROUP, slot_stride, HEAD_DIM, BLOCK_N, BLOCK_D, UPCAST,
        )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)  # of rows past the last token, which may see no key
    attended = (acc / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + tokens * out_token_stride + head * HEAD_DIM + d[None, :], attended, mask=present)


@triton.jit
def decode_attention(
    q, pool, partial, partial_lse, kv_indptr, kv_indices, scale, window, split_len,
    q_token_stride, q_head_stride, slot_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head, split): the query heads of one KV head over `split_len` tokens of the context.

    `partial` is `[bs, heads, splits, D]`, `partial_lse` `[bs, heads, splits]`: log2 of the sum of weights, minus
    infinity where the split lies beyond the context.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    kv_begin = tl.load(kv_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - kv_begin

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    present = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + g
    queries = tl.load(
        q + request.to(tl.int64) * q_token_stride + heads[:, None] * q_head_stride + d[None, :],
        mask=present,
        other=0.0,
    )
    if UPCAST:
        queries = queries.to(tl.float32)

    positions = tl.zeros([BLOCK_G], tl.int32) + kv_len - 1
    end = tl.minimum(kv_len, (split + 1) * split_len)
    begin = tl.maximum(split * split_len, tl.maximum(0, kv_len - window) // BLOCK_N * BLOCK_N)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for first in range(begin, end, BLOCK_N):
        acc, peak, total = _attend_block(
            queries, acc, peak, total, pool, kv_indices, kv_begin, first, end, positions, scale, window,
            kv_head, slot_stride, HEAD_DIM, BLOCK_N, BLOCK_D, UPCAST,
        )  # fmt: skip
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    cells = (request * tl.num_programs(1) * GROUP + heads).to(tl.int64) * splits + split
    tl.store(partial + cells[:, None] * HEAD_DIM + d[None, :], acc / divisor[:, None], mask=present)
    lse = tl.where(is_empty, float("-inf"), peak + tl.log2(divisor))
    tl.store(partial_lse + cells, lse, mask=g < GROUP)


@triton.jit
def merge_splits(
    partial, partial_lse, out, splits,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (request, head): the splits of `decode_attention`, weighted by their sums; `out` is `[bs, heads, D]`."""
    cell = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(partial_lse + cell * splits + s, mask=s < splits, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    attended = tl.load(
        partial + (cell * splits + s)[:, None] * HEAD_DIM + d[None, :],
        mask=(s < splits)[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(attended * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + cell * HEAD_DIM + d, merged.to(out.dtype.element_ty), mask=d < HEAD_DIM)
