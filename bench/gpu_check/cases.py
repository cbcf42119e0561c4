"""Batches with slots in any order, and what attention over them is, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.executor.forward_batch import ForwardBatch, ForwardMode, SamplingBatch
from shared.kernels.base import AttentionShape

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Absolute, for attention to values of about 1: rounding of the weights and of the result to the type of the values."""


@dataclass(frozen=True)
class Case:
    """Requests with their KV strewn over a pool whose other slots are NaN."""

    shape: AttentionShape
    batch: ForwardBatch
    q: Tensor
    pool: Tensor


def greedy_sampling(count: int, vocab_size: int) -> SamplingBatch:
    floats = np.zeros(count, dtype=np.float32)
    return SamplingBatch(
        greedy=np.ones(count, dtype=np.bool_),
        temperature=floats + 1,
        top_k=np.full(count, vocab_size),
        top_p=floats + 1,
        min_p=floats,
        frequency_penalty=floats,
        presence_penalty=floats,
        repetition_penalty=floats + 1,
        seed=np.zeros(count, dtype=np.uint64),
        counts=[None] * count,
        logit_bias=[None] * count,
        blocked_until=[None] * count,
        all_greedy=True,
        any_adjustment=False,
    )


def make_batch(
    requests: Sequence[tuple[int, int]], num_slots: int, seed: int, mode: ForwardMode, vocab_size: int = 100
) -> ForwardBatch:
    """Greedy requests given as (tokens before, new tokens), in rows and slots of any order."""
    random = np.random.default_rng(seed)
    bs = len(requests)
    seq_lens = np.array([before + new for before, new in requests])
    extend_lens = np.array([new for _, new in requests])
    slots = random.permutation(num_slots)
    rows = random.permutation(bs + 2)[:bs]
    table = np.zeros((bs + 2, int(seq_lens.max()) + 7), dtype=np.int32)
    for row, end, length in zip(rows, np.cumsum(seq_lens), seq_lens, strict=True):
        table[row, :length] = slots[end - length : end]
    spans = [np.arange(end - new, end) for end, new in zip(seq_lens, extend_lens, strict=True)]
    new_slots = [table[row, span] for row, span in zip(rows, spans, strict=True)]
    return ForwardBatch(
        step=0,
        mode=mode,
        rids=[str(i) for i in range(bs)],
        input_ids=random.integers(3, vocab_size, int(extend_lens.sum())),
        positions=np.concatenate(spans),
        req_pool_indices=rows,
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        out_cache_loc=np.concatenate(new_slots).astype(np.int64),
        req_to_token=table,
        emits=np.ones(bs, dtype=np.bool_),
        output_lens=np.zeros(bs, dtype=np.int64),
        sampling=greedy_sampling(bs, vocab_size),
        top_logprobs_nums=None,
    )


def make_case(
    requests: Sequence[tuple[int, int]],
    shape: AttentionShape,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
    mode: ForwardMode | None = None,
) -> Case:
    """Of requests as for `make_batch`; a decode where all of them have one new token, unless told otherwise."""
    if mode is None:
        mode = ForwardMode.DECODE if all(new == 1 for _, new in requests) else ForwardMode.EXTEND
    used = sum(before + new for before, new in requests)
    batch = make_batch(requests, used + 5, seed, mode)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(used + 5, 2, shape.kv_heads, shape.head_dim, generator=generator).to(dtype)
    taken = torch.zeros(used + 5, dtype=torch.bool)
    for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True):
        taken[batch.req_to_token[row, :length].astype(np.int64)] = True
    pool[~taken] = torch.nan
    # A view of a wider tensor, as the fused projection gives it.
    heads = torch.randn(len(batch.input_ids), shape.query_heads + 3, shape.head_dim, generator=generator).to(dtype)
    return Case(shape, batch, heads.to(device)[:, : shape.query_heads], pool.to(device))


def reference_attention(case: Case) -> Tensor:
    """`[T, query_heads * D]` in float64 on the CPU, one request and head at a time."""
    shape, batch = case.shape, case.batch
    q, pool = case.q.double().cpu(), case.pool.double().cpu()
    out = torch.empty_like(q)
    ends = np.cumsum(batch.extend_lens)
    for row, end, new, length in zip(batch.req_pool_indices, ends, batch.extend_lens, batch.seq_lens, strict=True):
        context = pool[batch.req_to_token[row, :length].astype(np.int64)]
        position = torch.arange(length - new, length)[:, None]
        key = torch.arange(length)
        hidden = (key > position) | (key <= position - (shape.sliding_window or length))
        for head in range(shape.query_heads):
            keys, values = context[:, :, head * shape.kv_heads // shape.query_heads].unbind(1)
            scores = (q[end - new : end, head] @ keys.T / shape.head_dim**0.5).masked_fill(hidden, -torch.inf)
            out[end - new : end, head] = scores.softmax(dim=-1) @ values
    return out.flatten(1)
