"""The Triton backend: for GPUs, and for any CPU under `TRITON_INTERPRET=1`, where it is only good for tests."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from shared.executor.forward_batch import ForwardBatch, ForwardMode
from shared.executor.to_device import to_device
from shared.kernels.base import AttentionShape, Limits
from shared.kernels.choice import INTERPRETER
from shared.kernels.paged import Int32Array, PagedKv, paged_kv
from shared.kernels.torch_sampling import masses, race
from shared.kernels.triton_kernels import attention, limits, pointwise
from shared.layers.noise import exponential_noise

FEWEST_PER_SPLIT = 512
MOST_SPLITS = 32
"""A decode's context is cut into parts of at least so many tokens and at most so many parts, which run side by side.
Where it is cut depends on the length of the request table alone, so that no neighbour changes a request's sums."""
IS_INTERPRETED = os.environ.get(INTERPRETER) == "1"
NO_WINDOW = 1 << 30
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class ExtendPlan:
    shape: AttentionShape
    tile_request: Tensor
    """int32 [tiles]"""
    tile_first: Tensor
    """int32 [tiles]; the first of the request's new tokens that the tile holds"""
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor


@dataclass(frozen=True)
class DecodePlan:
    shape: AttentionShape
    splits: int
    split_len: int
    kv_indptr: Tensor
    kv_indices: Tensor


class TritonKernels:
    """`shared.kernels.base.GraphKernels` in Triton; matrix products are torch's, which are cuBLAS's."""

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, packed, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
        rows = x.shape[0] * num_heads
        block = triton.next_power_of_2(width)
        if rows:
            pointwise.rms_norm[(rows,)](x, weight, out, eps, num_heads, x.stride(0), x.stride(-2), width, block)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(residual)
        rows, width = x.shape
        if rows:
            block = triton.next_power_of_2(width)
            pointwise.add_rms_norm[(rows,)](x.contiguous(), residual, weight, out, eps, width, block)
        return out

    def rope(self, qk: Tensor, cos: Tensor, sin: Tensor) -> None:
        num_tokens, num_heads, head_dim = qk.shape
        block_h, block_half = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim // 2)
        pointwise.rope[(num_tokens,)](
            qk, cos, sin, num_heads, qk.stride(0), qk.stride(1), head_dim, block_h, block_half
        )  # fmt: skip

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        block = min(1024, triton.next_power_of_2(width))
        pointwise.silu_and_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block)
        return out

    def store_kv(self, pool: Tensor, loc: Tensor, kv: Tensor) -> None:
        width = pool[0].numel()
        block = min(1024, triton.next_power_of_2(width))
        pointwise.store_kv[(len(loc), triton.cdiv(width, block))](pool, loc, kv, kv.stride(0), width, block)

    def plan_attention(self, batch: ForwardBatch, shape: AttentionShape, pool: Tensor) -> Any:
        paged = paged_kv(batch)
        kv_indptr, kv_indices = to_device(paged.kv_indptr, pool.device), to_device(paged.kv_indices, pool.device)
        if batch.mode is ForwardMode.DECODE:
            return DecodePlan(shape, *split_of(batch.req_to_token.shape[1]), kv_indptr, kv_indices)
        tile_request, tile_first = tiles_of(batch.extend_lens, block_sizes(pool, shape)[0])
        return ExtendPlan(
            shape,
            to_device(tile_request, pool.device),
            to_device(tile_first, pool.device),
            to_device(paged.qo_indptr, pool.device),
            kv_indptr,
            kv_indices,
        )

    def plan_for_graph(
        self, batch_size: int, kv_indices: Tensor, context_length: int, shape: AttentionShape, pool: Tensor
    ) -> Any:
        kv_indptr = torch.zeros(batch_size + 1, dtype=torch.int32, device=pool.device)
        return DecodePlan(shape, *split_of(context_length), kv_indptr, kv_indices)

    def refill(self, plan: Any, paged: PagedKv) -> None:
        device = plan.kv_indptr.device
        plan.kv_indptr.copy_(to_device(paged.kv_indptr, device))
        plan.kv_indices[: len(paged.kv_indices)].copy_(to_device(paged.kv_indices, device))

    def attention(self, q: Tensor, pool: Tensor, plan: Any) -> Tensor:
        return _attend_decode(q, pool, plan) if isinstance(plan, DecodePlan) else _attend_extend(q, pool, plan)


class TritonSampling:
    """`shared.kernels.base.SamplingKernels`: Triton cuts, torch draws, so that tokens are those of `TorchSampling`."""

    def draw_limited(self, scores: Tensor, weights: Tensor, keys: Tensor, limits: Limits) -> Tensor:
        limited = keep_limited(scores, weights, limits)
        return race(limited, limits.min_p, exponential_noise(keys, None, scores.shape[1]))


def keep_limited(scores: Tensor, weights: Tensor, row_limits: Limits) -> Tensor:
    """`weights`, zeroed in place outside top-k and top-p; `[rows, vocab]` as `scores`, both float32."""
    rows, vocab_size = scores.shape
    weights = weights.contiguous()
    block = min(4096, triton.next_power_of_2(vocab_size))
    limits.limit[(rows,)](
        scores.contiguous(), masses(weights), weights, row_limits.top_k, row_limits.top_p, vocab_size, block
    )  # fmt: skip
    return weights


def split_of(context_length: int) -> tuple[int, int]:
    """Into how many parts a decode cuts its context, and how long they are."""
    splits = min(MOST_SPLITS, triton.cdiv(context_length, FEWEST_PER_SPLIT))
    # Whole blocks of keys, so that a part begins where a block does.
    return splits, triton.cdiv(triton.cdiv(context_length, splits), 64) * 64


def tiles_of(extend_lens: np.ndarray[tuple[int], np.dtype[np.int64]], block: int) -> tuple[Int32Array, Int32Array]:
    """The request and the first new token of every tile of `block` tokens, int32 `[tiles]`; the longest come first."""
    counts = -(-extend_lens // block)
    request = np.repeat(np.arange(len(extend_lens), dtype=np.int32), counts)
    ends = np.cumsum(counts)
    first = (np.arange(ends[-1]) - np.repeat(ends - counts, counts)) * block
    # A late tile looks back on the most keys: started last it would run alone at the end.
    order = np.argsort(-first, kind="stable")
    return request[order], first[order].astype(np.int32)


def block_sizes(pool: Tensor, shape: AttentionShape) -> tuple[int, int, int, int]:
    """Queries and keys of a block, padded size of a head, and stages of the pipeline that fit in shared memory."""
    block_d = max(16, triton.next_power_of_2(shape.head_dim))
    is_small = pool.dtype.itemsize * block_d <= 256
    return (64, 64, block_d, 2) if is_small else (32, 32, block_d, 1)


def _scale(shape: AttentionShape) -> float:
    return LOG2_E / math.sqrt(shape.head_dim)


def _attend_extend(q: Tensor, pool: Tensor, plan: ExtendPlan) -> Tensor:
    shape = plan.shape
    out = q.new_empty((q.shape[0], shape.query_heads * shape.head_dim))
    block_m, block_n, block_d, stages = block_sizes(pool, shape)
    attention.extend_attention[(len(plan.tile_request), shape.query_heads)](
        q, pool, out, plan.tile_request, plan.tile_first, plan.qo_indptr, plan.kv_indptr, plan.kv_indices,
        _scale(shape), shape.sliding_window or NO_WINDOW,
        q.stride(0), q.stride(1), out.stride(0), pool.stride(0),
        shape.query_heads // shape.kv_heads, shape.head_dim, block_m, block_n, block_d, IS_INTERPRETED,
        num_stages=stages,
    )  # fmt: skip
    return out


def _attend_decode(q: Tensor, pool: Tensor, plan: DecodePlan) -> Tensor:
    shape, batch_size, splits = plan.shape, q.shape[0], plan.splits
    group = shape.query_heads // shape.kv_heads
    partial = torch.empty((batch_size, shape.query_heads, splits, shape.head_dim), device=q.device)
    partial_lse = torch.empty((batch_size, shape.query_heads, splits), device=q.device)
    _, block_n, block_d, stages = block_sizes(pool, shape)
    attention.decode_attention[(batch_size, shape.kv_heads, splits)](
        q, pool, partial, partial_lse, plan.kv_indptr, plan.kv_indices,
        _scale(shape), shape.sliding_window or NO_WINDOW, plan.split_len,
        q.stride(0), q.stride(1), pool.stride(0),
        group, shape.head_dim, max(16, triton.next_power_of_2(group)), block_n, block_d, IS_INTERPRETED,
        num_stages=stages,
    )  # fmt: skip
    out = q.new_empty((batch_size, shape.query_heads * shape.head_dim))
    attention.merge_splits[(batch_size, shape.query_heads)](
        partial, partial_lse, out, splits, shape.head_dim, triton.next_power_of_2(splits), block_d
    )  # fmt: skip
    return out
