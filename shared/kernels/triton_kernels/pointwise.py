"""RMSNorm, RoPE, SiLU-and-multiply and the KV store: one program per row or part of a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, weight, out, eps, num_heads, token_stride, head_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (token x head): `x` is `[T, num_heads, WIDTH]`, strided; `out` is the same, contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    begin = x + row // num_heads * token_stride + row % num_heads * head_stride
    values = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
    _store_norm(values, weight, out + row * WIDTH, eps, column, inside, WIDTH)


@triton.jit
def add_rms_norm(x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token): `residual += x`, `out` the norm of the sum as it was stored; all `[T, WIDTH]`, contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    cells = row * WIDTH + column
    values = tl.load(x + cells, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(residual + cells, mask=inside, other=0.0).to(tl.float32)
    stored = values.to(residual.dtype.element_ty)
    tl.store(residual + cells, stored, mask=inside)
    _store_norm(stored.to(tl.float32), weight, out + row * WIDTH, eps, column, inside, WIDTH)


@triton.jit
def _store_norm(values, weight, out, eps, column, inside, WIDTH: tl.constexpr):
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope(
    qk, cos, sin, num_heads, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program (token): every head of `qk`, `[T, num_heads, HEAD_DIM]`, strided, turned in place."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_HALF)
    inside = (head < num_heads)[:, None] & (d < HALF)[None, :]
    low_cells = qk + token * token_stride + head[:, None] * head_stride + d[None, :]
    low = tl.load(low_cells, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(low_cells + HALF, mask=inside, other=0.0).to(tl.float32)
    angles = token * HEAD_DIM + d
    cos_low = tl.load(cos + angles, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angles, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angles + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angles + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    element = qk.dtype.element_ty
    tl.store(low_cells, (low * cos_low + high * sin_low).to(element), mask=inside)
    tl.store(low_cells + HALF, (high * cos_high + low * sin_high).to(element), mask=inside)


@triton.jit
def silu_and_mul(gate_up, out, WIDTH, BLOCK: tl.constexpr):
    """Program (token, block): `gate_up` is `[T, 2 WIDTH]`, `out` `[T, WIDTH]`, both contiguous."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_kv(pool, loc, kv, token_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block): a row of `kv` (`WIDTH` elements, contiguous) to slot `loc[token]` of the pool."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    slot = tl.load(loc + token).to(tl.int64)
    tl.store(pool + slot * WIDTH + column, tl.load(kv + token * token_stride + column, mask=inside), mask=inside)
