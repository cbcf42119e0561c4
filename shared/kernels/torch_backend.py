"""The torch backend: the CPU's, and the reference for the others."""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
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


HAS_BLOCKED_LINEAR: bool = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")
"""Whether oneDNN's blocked weights were measured to pay on this kind of machine."""
MOST_BLOCKED_ROWS = 64
"""On Intel's processors products with blocked weights are quicker up to here, but never for one row."""
FEWEST_BLOCKED_OUTPUTS = 2048
"""Narrower layers gain nothing there, and each blocked weight is a second copy in memory."""

_linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if HAS_BLOCKED_LINEAR else None
"""The operation itself, which need not be looked up at every call."""

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")

SlotIndex = Tensor | slice
"""Rows of a pool: a slice where they are consecutive, which is a view and costs no gathering."""


def is_intel() -> bool:
    """Whether torch's other library, MKL, is at its best here: on the processors of its own maker."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # every Mac with an x86 processor


@dataclass(frozen=True)
class _PackedLinear:
    """One layout or both, float32 on x86."""

    transposed: Tensor | None
    """[in, out], for MKL: 10 to 15 % quicker than [out, in] where one row or very many are multiplied"""
    blocked: Tensor | None
    """in oneDNN's layout"""


@dataclass(frozen=True)
class _SingleTokens:
    """Requests with one new token each, attended together over contexts padded to the longest.

    A short row repeats its own last slot, so that no request ever reads another's KV.
    """

    tokens: Tensor | None
    """[n] indices into T; None for all of them in order"""
    slots: SlotIndex | None
    """[n * length], to gather; None where the pool is read in place"""
    in_place: _InPlace | None
    mask: Tensor | None
    """[n, 1, 1, length], 0 or -inf; None where all contexts are equally long"""


@dataclass(frozen=True)
class _InPlace:
    """Where the heads of `n` requests find their keys and values in a pool seen as `[slots * 2 * kv_heads, D]`.

    Attention is then two operations that torch has for other ends, and that copy no row: a product of dense
    matrices at a sparse one's places (scores), and a weighted sum of rows of an embedding table (values).
    """

    scores: Tensor
    """sparse CSR [n * heads, slots * 2 * kv_heads]: `length` places a row, those of its keys; written over"""
    values: Tensor
    """[n * heads, length]; rows of its values"""


@dataclass(frozen=True)
class _ManyTokens:
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
    many: list[_ManyTokens]


class TorchKernels:
    """`shared.kernels.base.Kernels` in torch operations."""

    def __init__(self) -> None:
        self._prefers_blocked = HAS_BLOCKED_LINEAR and not is_intel()

    def pack_linear(self, weight: Tensor) -> _PackedLinear:
        blocked = None
        is_wide = self._prefers_blocked or weight.shape[0] >= FEWEST_BLOCKED_OUTPUTS
        if HAS_BLOCKED_LINEAR and is_wide and weight.device.type == "cpu" and weight.dtype == torch.float32:
            blocked = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            if self._prefers_blocked:
                return _PackedLinear(None, blocked)
        return _PackedLinear(weight.t().contiguous(), blocked)

    def linear(self, x: Tensor, packed: _PackedLinear, bias: Tensor | None) -> Tensor:
        if packed.transposed is None or (packed.blocked is not None and 1 < x.shape[0] <= MOST_BLOCKED_ROWS):
            product: Tensor = _linear_pointwise(x, packed.blocked, bias, "none", [], "")
            return product
        if bias is None:
            return torch.mm(x, packed.transposed)
        return torch.addmm(bias, x, packed.transposed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, weight.shape, weight, eps)
        # On the CPU that is more operations than these, which is what it costs for few rows.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse_rms = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        normed: Tensor = (x * inverse_rms).mul_(weight)
        return normed

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
        many = [_plan_many(batch, int(row), int(starts[row]), shape, pool) for row in np.flatnonzero(~is_single)]
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
            out[many.start : many.stop] = _attend_many(q[many.start : many.stop], pool, many)
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
    in_place = _plan_in_place(slots, shape, pool) if len(rows) > 1 and _reads_in_place(pool) else None
    mask = None
    if is_padding.any():
        bias = np.where(is_padding, -np.inf, 0.0).astype(np.float32)
        mask = torch.from_numpy(bias[:, None, None]).to(pool.device, pool.dtype)
    tokens = None if len(rows) == len(batch.input_ids) else torch.from_numpy(starts[rows]).to(pool.device)
    index = None if in_place else _slot_index(slots.reshape(-1), pool)
    return _SingleTokens(tokens, index, in_place, mask)


def _reads_in_place(pool: Tensor) -> bool:
    """Whether torch has the two operations of `_InPlace` for this kind of pool."""
    return pool.device.type == "cpu" and pool.dtype == torch.float32


def _plan_in_place(slots: IntArray, shape: AttentionShape, pool: Tensor) -> _InPlace:
    """For `slots`, `[n, length]`."""
    length = slots.shape[1]
    kv_head = np.arange(shape.query_heads) * shape.kv_heads // shape.query_heads
    keys = (slots[:, None] * (2 * shape.kv_heads) + kv_head[:, None]).reshape(-1, length)
    values = torch.from_numpy(keys + shape.kv_heads)
    row_ends = torch.arange(0, keys.size + 1, length)
    places = (keys.shape[0], pool.numel() // shape.head_dim)
    found_at = torch.from_numpy(keys).view(-1)
    scores = torch.sparse_csr_tensor(row_ends, found_at, torch.zeros(keys.size), places, check_invariants=False)
    return _InPlace(scores, values)


def _plan_many(batch: ForwardBatch, row: int, start: int, shape: AttentionShape, pool: Tensor) -> _ManyTokens:
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
    return _ManyTokens(start, start + count, _slot_index(slots, pool), mask)


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
    if plan.in_place is not None:
        return _attend_in_place(q, pool, plan.in_place, plan.mask).view(n, kv_heads, heads // kv_heads, head_dim)
    assert plan.slots is not None
    keys, values = _rows_of(pool, plan.slots).view(n, -1, 2, kv_heads, head_dim).transpose(1, 3).unbind(2)
    grouped = q.view(n, kv_heads, heads // kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask)


def _attend_in_place(q: Tensor, pool: Tensor, plan: _InPlace, mask: Tensor | None) -> Tensor:
    """`[n, heads, D]` to `[n * heads, D]`."""
    n, heads, head_dim = q.shape
    table, queries, scale = pool.view(-1, head_dim), q.reshape(-1, head_dim), head_dim**-0.5
    plan.scores.values().zero_()  # beta=0 alone would carry a NaN from layer to layer
    torch.sparse.sampled_addmm(plan.scores, queries, table.t(), beta=0.0, alpha=scale, out=plan.scores)
    scores = plan.scores.values().view(n, heads, -1)
    if mask is not None:
        scores = scores + mask[:, 0]
    weights = torch.softmax(scores, dim=-1).view(plan.values.shape)
    return F.embedding_bag(plan.values, table, per_sample_weights=weights, mode="sum")


def _attend_many(q: Tensor, pool: Tensor, plan: _ManyTokens) -> Tensor:
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
