"""The torch backend: the reference for the others, which runs anywhere and in every type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.executor.forward_batch import ForwardBatch
from shared.kernels.base import AttentionShape
from shared.messages import IntArray

MAX_PADDING = 1.25
"""Single-token rows share a padded batch while it holds at most this many times their own slots."""

SlotIndex = Tensor | slice
"""Rows of a pool: a slice where they are consecutive, which is a view and costs no gathering."""


@dataclass(frozen=True)
class _SingleTokens:
    """Requests with one new token each, attended together over contexts padded to the longest.

    A short row repeats its own last slot, so that no request ever reads another's KV.
    """

    tokens: Tensor | None
    """[n] indices into T; None for all of them in order"""
    slots: SlotIndex
    """[n * length]"""
    mask: Tensor | None
    """[n, 1, 1, length], 0 or -inf; None where all contexts are equally long"""


@dataclass(frozen=True)
class ManyTokens:
    """The tokens `start … stop - 1` of one request."""

    start: int
    stop: int
    slots: SlotIndex
    """[length]"""
    mask: Tensor | None
    """[stop - start, length], 0 or -inf; None for plain causal attention without a prefix"""


@dataclass(frozen=True)
class _Plan:
    shape: AttentionShape
    single: list[_SingleTokens]
    many: list[ManyTokens]


class TorchKernels:
    """`shared.kernels.base.Kernels` in torch operations."""

    def pack_linear(self, weight: Tensor) -> Any:
        """[in, out]: 10 to 15 % quicker than [out, in] where one row or very many are multiplied."""
        return weight.t().contiguous()

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.mm(x, packed)
        return torch.addmm(bias, x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def rope(self, qk: Tensor, cos: Tensor, sin: Tensor) -> None:
        halves_swapped = qk.roll(qk.shape[-1] // 2, dims=-1)
        qk.mul_(cos).addcmul_(halves_swapped, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def store_kv(self, pool: Tensor, loc: Tensor, kv: Tensor) -> None:
        pool.index_copy_(0, loc, kv)

    def plan_attention(self, batch: ForwardBatch, shape: AttentionShape, pool: Tensor) -> _Plan:
        starts = np.cumsum(batch.extend_lens) - batch.extend_lens
        is_single = batch.extend_lens == 1
        single_rows = np.flatnonzero(is_single)
        many = [plan_many(batch, int(row), int(starts[row]), shape, pool) for row in np.flatnonzero(~is_single)]
        groups = _groups_of_similar_length(single_rows, batch.seq_lens)
        single = [_plan_single(batch, rows, starts, shape, pool) for rows in groups]
        return _Plan(shape, single, many)

    def attention(self, q: Tensor, pool: Tensor, plan: _Plan) -> Tensor:
        heads, kv_heads, head_dim = plan.shape.query_heads, plan.shape.kv_heads, plan.shape.head_dim
        if not plan.many and len(plan.single) == 1 and plan.single[0].tokens is None:
            return _attend_single(q, pool, plan.single[0], kv_heads).reshape(-1, heads * head_dim)
        out = q.new_empty((q.shape[0], heads, head_dim))
        for single in plan.single:
            out[single.tokens] = _attend_single(q[single.tokens], pool, single, kv_heads).flatten(1, 2)
        for many in plan.many:
            out[many.start : many.stop] = attend_many(q[many.start : many.stop], pool, many)
        return out.view(-1, heads * head_dim)


def _groups_of_similar_length(rows: IntArray, seq_lens: IntArray) -> list[IntArray]:
    """`rows` in groups whose padding stays within `MAX_PADDING`, one group where that is possible."""
    lengths = seq_lens[rows]
    if len(rows) == 0:
        return []
    if lengths.max() * len(rows) <= MAX_PADDING * lengths.sum():
        return [rows]
    order = rows[np.argsort(lengths, kind="stable")]
    groups: list[list[int]] = [[]]
    total = 0
    for row in order.tolist():
        length = int(seq_lens[row])
        if groups[-1] and length * (len(groups[-1]) + 1) > MAX_PADDING * (total + length):
            groups.append([])
            total = 0
        groups[-1].append(row)
        total += length
    return [np.array(group, dtype=np.int64) for group in groups]


def _plan_single(
    batch: ForwardBatch, rows: IntArray, starts: IntArray, shape: AttentionShape, pool: Tensor
) -> _SingleTokens:
    ends = batch.seq_lens[rows]
    lengths = ends if shape.sliding_window is None else np.minimum(ends, shape.sliding_window)
    column = np.arange(int(lengths.max()), dtype=np.int64)
    is_padding = column >= lengths[:, None]
    positions = np.where(is_padding, ends[:, None] - 1, (ends - lengths)[:, None] + column)
    slots = batch.req_to_token[batch.req_pool_indices[rows, None], positions].astype(np.int64)
    mask = None
    if is_padding.any():
        bias = np.where(is_padding, -np.inf, 0.0).astype(np.float32)
        mask = torch.from_numpy(bias[:, None, None]).to(pool.device, pool.dtype)
    tokens = None if len(rows) == len(batch.input_ids) else torch.from_numpy(starts[rows]).to(pool.device)
    return _SingleTokens(tokens, _slot_index(slots.reshape(-1), pool), mask)


def plan_many(batch: ForwardBatch, row: int, start: int, shape: AttentionShape, pool: Tensor) -> ManyTokens:
    """For request `row` of the batch, whose new tokens begin at `start`."""
    count, end = int(batch.extend_lens[row]), int(batch.seq_lens[row])
    window = shape.sliding_window or end
    first_seen = max(0, end - count - window + 1)
    slots = batch.req_to_token[batch.req_pool_indices[row], first_seen:end].astype(np.int64)
    mask = None
    if end > count or window < end:
        query = torch.arange(end - count, end, device=pool.device)[:, None]
        key = torch.arange(first_seen, end, device=pool.device)
        hidden = (key > query) | (key <= query - window)
        mask = torch.zeros(hidden.shape, dtype=pool.dtype, device=pool.device).masked_fill_(hidden, -torch.inf)
    return ManyTokens(start, start + count, _slot_index(slots, pool), mask)


def _slot_index(slots: IntArray, pool: Tensor) -> SlotIndex:
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) == first + count - 1 and bool((slots == np.arange(first, first + count)).all()):
        return slice(first, first + count)
    return torch.from_numpy(slots).to(pool.device)


def _rows_of(pool: Tensor, slots: SlotIndex) -> Tensor:
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


def _attend_single(q: Tensor, pool: Tensor, plan: _SingleTokens, kv_heads: int) -> Tensor:
    """`[n, heads, D]` to `[n, kv_heads, heads / kv_heads, D]`: heads that share KV are one head's queries."""
    n, heads, head_dim = q.shape
    keys, values = _rows_of(pool, plan.slots).view(n, -1, 2, kv_heads, head_dim).transpose(1, 3).unbind(2)
    grouped = q.view(n, kv_heads, heads // kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask)


def attend_many(q: Tensor, pool: Tensor, plan: ManyTokens) -> Tensor:
    """`[n, heads, D]` to the same."""
    keys, values = _rows_of(pool, plan.slots).permute(1, 2, 0, 3).unsqueeze(1)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=plan.mask,
        is_causal=plan.mask is None,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
