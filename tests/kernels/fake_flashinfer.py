"""A model of FlashInfer's documented contract (0.7): what it asks of its arguments, and slow attention over pages."""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def _check_page_table(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
    for tensor in (indptr, indices, last_page_len):
        assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
    assert len(indptr) == len(last_page_len) + 1
    assert int(indptr[0]) == 0 and int(indptr[-1]) == len(indices)
    assert bool((indptr.diff() >= 1).all())
    assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD"

    def _keep(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        *, window_left: int = -1, q_data_type: Any = torch.float16, kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        _check_page_table(indptr, indices, last_page_len, page_size)
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type in HALF and kv_data_type in (None, q_data_type)
        assert window_left >= -1
        self._qo_indptr, self._indptr, self._indices = qo_indptr.tolist(), indptr.clone(), indices.clone()
        self._lengths = ((indptr.diff() - 1) * page_size + last_page_len).tolist()
        self._shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._window_left, self._dtype = window_left, q_data_type

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        qo_heads, kv_heads, head_dim, page_size = self._shape
        assert q.shape == (self._qo_indptr[-1], qo_heads, head_dim) and q.is_contiguous()
        assert paged_kv_cache.shape[1:] == (2, page_size, kv_heads, head_dim)
        assert q.dtype == paged_kv_cache.dtype == self._dtype
        out = torch.empty_like(q)
        for i, length in enumerate(self._lengths):
            pages = self._indices[self._indptr[i] : self._indptr[i + 1]].long()
            keys, values = paged_kv_cache[pages].float().transpose(0, 1).flatten(1, 2)[:, :length]
            queries = q[self._qo_indptr[i] : self._qo_indptr[i + 1]].float()
            position = torch.arange(length - len(queries), length)[:, None]
            hidden = torch.arange(length) > position
            if self._window_left >= 0:
                hidden |= torch.arange(length) < position - self._window_left
            keys, values = (x.repeat_interleave(qo_heads // kv_heads, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(head_dim)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            attended = torch.einsum("hqk,khd->qhd", weights, values)
            out[self._qo_indptr[i] : self._qo_indptr[i + 1]] = attended.to(q.dtype)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        assert causal
        assert qo_indptr.dtype == torch.int32 and int(qo_indptr[0]) == 0 and len(qo_indptr) == len(paged_kv_indptr)
        self._keep(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, **kwargs,
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, **kwargs: Any,
    ) -> None:  # fmt: skip
        if self._buffers is not None:
            assert len(last_page_len) == len(self._buffers[2]), "a graph's batch size cannot change"
            assert len(indices) <= len(self._buffers[1])
            self._buffers[0].copy_(indptr)
            self._buffers[1][: len(indices)].copy_(indices)
        qo_indptr = torch.arange(len(indptr))
        self._keep(qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    assert input.dim() in (2, 3) and input.is_contiguous()
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(input: Tensor) -> Tensor:
    gate, up = input.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def top_k_renorm_probs(probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
    assert top_k.dtype == torch.int32 and bool(((top_k > 0) & (top_k < probs.shape[1])).all())
    border = probs.sort(dim=-1, descending=True).values.gather(1, top_k.long()[:, None] - 1)
    return _renorm(probs.masked_fill(probs < border, 0))


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    assert top_p.dtype == torch.float32 and bool(((top_p > 0) & (top_p < 1)).all())
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(len(probs)))
    best = probs.sort(dim=-1, descending=True).values
    needed = (best.cumsum(dim=-1) - best < top_p[:, None]).sum(dim=-1, keepdim=True)
    return _renorm(probs.masked_fill(probs < best.gather(1, needed - 1), 0))


def _renorm(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def as_module() -> ModuleType:
    module = ModuleType("flashinfer")
    for value in (
        BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper,
        rmsnorm, fused_add_rmsnorm, silu_and_mul,
    ):  # fmt: skip
        setattr(module, value.__name__, value)
    sampling = SimpleNamespace(top_k_renorm_probs=top_k_renorm_probs, top_p_renorm_probs=top_p_renorm_probs)
    module.sampling = sampling  # type: ignore[attr-defined]
    return module
