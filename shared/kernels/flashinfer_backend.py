"""The FlashInfer backend: half precision on NVIDIA GPUs.

FlashInfer's attention is planned once per forward and run once per layer.  A layer's pool is its paged KV cache
at a page size of one: `[slots, 2, 1, kv_heads, D]` in the layout NHD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import torch
from torch import Tensor

from shared.executor.forward_batch import ForwardBatch, ForwardMode
from shared.executor.to_device import pinned, to_device
from shared.kernels.base import AttentionShape, Limits
from shared.kernels.paged import PagedKv, paged_kv
from shared.kernels.torch_sampling import race
from shared.kernels.triton_backend import TritonKernels
from shared.layers.noise import exponential_noise

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends; shared by all wrappers, which never run at a time."""
LAYOUT = "NHD"
PAGE_SIZE = 1
GROUP_FOR_TENSOR_CORES = 4
"""From so many query heads to a KV head on, a decode is quicker on the tensor cores."""


@dataclass(frozen=True)
class Plan:
    """What FlashInfer calls a wrapper, planned."""

    wrapper: Any
    shape: AttentionShape
    dtype: torch.dtype


class FlashInferKernels(TritonKernels):
    """`shared.kernels.base.GraphKernels`: attention, norms and the activation are FlashInfer's.

    RoPE and the KV store stay Triton's: FlashInfer's RoPE looks cos and sin up by position, where ours come
    gathered, and its store takes keys and values apart.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        self._decodes: dict[bool, Any] = {}
        self._plan_is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return flashinfer.rmsnorm(x.contiguous(), weight, eps)  # type: ignore[no-any-return]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return flashinfer.silu_and_mul(gate_up)  # type: ignore[no-any-return]

    def plan_attention(self, batch: ForwardBatch, shape: AttentionShape, pool: Tensor) -> Any:
        paged = paged_kv(batch)
        if batch.mode is ForwardMode.DECODE:
            plan = Plan(self._decode_wrapper(shape), shape, pool.dtype)
            self.refill(plan, paged)
            return plan
        plan = Plan(self._prefill, shape, pool.dtype)
        self._plan(plan, paged, pinned(paged.qo_indptr, self._device), causal=True)
        return plan

    def plan_for_graph(
        self, batch_size: int, kv_indices: Tensor, context_length: int, shape: AttentionShape, pool: Tensor
    ) -> Any:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=_uses_tensor_cores(shape),
            paged_kv_indptr_buffer=torch.zeros(batch_size + 1, dtype=torch.int32, device=pool.device),
            paged_kv_indices_buffer=kv_indices,
            paged_kv_last_page_len_buffer=torch.ones(batch_size, dtype=torch.int32, device=pool.device),
        )
        return Plan(wrapper, shape, pool.dtype)

    def refill(self, plan: Any, paged: PagedKv) -> None:
        self._plan(plan, paged)

    def attention(self, q: Tensor, pool: Tensor, plan: Any) -> Tensor:
        attended: Tensor = plan.wrapper.run(q.contiguous(), pool.unsqueeze(2))
        return attended.flatten(1)

    def _decode_wrapper(self, shape: AttentionShape) -> Any:
        on_tensor_cores = _uses_tensor_cores(shape)
        if on_tensor_cores not in self._decodes:
            self._decodes[on_tensor_cores] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, LAYOUT, use_tensor_cores=on_tensor_cores
            )
        return self._decodes[on_tensor_cores]

    def _plan(self, plan: Plan, paged: PagedKv, *qo_indptr: Tensor, **settings: bool) -> None:
        # FlashInfer plans into a pinned buffer of the wrapper and queues a copy; the last one must be through.
        self._plan_is_copied.synchronize()
        # The row pointers stay on the CPU, where the planner reads them: from the device it would wait for them.
        plan.wrapper.plan(
            *qo_indptr,
            pinned(paged.kv_indptr, self._device),
            to_device(paged.kv_indices, self._device),
            pinned(paged.last_page_len, self._device),
            plan.shape.query_heads,
            plan.shape.kv_heads,
            plan.shape.head_dim,
            PAGE_SIZE,
            window_left=_window_left(plan.shape),
            q_data_type=plan.dtype,
            kv_data_type=plan.dtype,
            **settings,
        )
        self._plan_is_copied.record()


class FlashInferSampling:
    """`shared.kernels.base.SamplingKernels`: FlashInfer cuts, torch draws.

    A request's tokens depend on nothing but itself, as with the other backends; but tokens tied at the border
    of top-k or top-p are not cut by id, so they can differ from what the other backends draw.
    """

    def draw_limited(self, scores: Tensor, weights: Tensor, keys: Tensor, limits: Limits) -> Tensor:
        vocab_size = scores.shape[1]
        top_k, top_p = limits.top_k[:, None], limits.top_p[:, None]
        # Both filters want a limit that is one; rows without it keep what they have.
        probs = weights / weights.sum(dim=-1, keepdim=True)
        within = limits.top_k.clamp(max=vocab_size - 1).int()
        left = flashinfer.sampling.top_k_renorm_probs(probs, within, is_deterministic=True)
        probs = torch.where(top_k < vocab_size, left, probs)
        within = limits.top_p.float().clamp(max=1 - 2.0**-24)
        left = flashinfer.sampling.top_p_renorm_probs(probs, within, is_deterministic=True)
        probs = torch.where(top_p < 1, left, probs)
        kept = weights.masked_fill(probs == 0, 0)
        return race(kept, limits.min_p, exponential_noise(keys, None, vocab_size))


def _window_left(shape: AttentionShape) -> int:
    """How many tokens before itself a token sees, -1 for all."""
    return -1 if shape.sliding_window is None else shape.sliding_window - 1


def _uses_tensor_cores(shape: AttentionShape) -> bool:
    return shape.query_heads // shape.kv_heads >= GROUP_FOR_TENSOR_CORES
