"""The interface of a kernel backend.

Shapes: T tokens of a forward, bs requests, `hidden` the width of the model, D the size of a head.  A layer's
KV pool is `[token slots, 2, kv_heads, D]`, keys at index 0 of the second dimension and values at 1: the paged
layout of the GPU libraries at a page size of one, and one row to copy or gather per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shared.executor.forward_batch import ForwardBatch
from shared.kernels.paged import PagedKv


@dataclass(frozen=True)
class AttentionShape:
    """What attention needs to know of the model, this rank's share of heads."""

    query_heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None
    """A token sees itself and the `sliding_window - 1` tokens before it; None for all before it."""


class Kernels(Protocol):
    """Every method may write over the inputs named in it, and no other."""

    def pack_linear(self, weight: Tensor) -> Any:
        """`weight`, `[out, in]`, in the form that `linear` of this backend is quickest with."""
        ...

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """`x W^T + bias`: `[n, in]` to `[n, out]`, with W from `pack_linear`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight` over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `x` to `residual` in place and returns the RMSNorm of the sum."""
        ...

    def rope(self, qk: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotates `qk`, `[T, heads, D]` (it may be a strided view), in place, halves paired: i with i + D/2.

        `cos` and `sin` are `[T, 1, D]`, those of the tokens' positions; the first half of `sin` is negated.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[T, 2 n]`, gate first: `[T, n]`.  May write over its input."""
        ...

    def store_kv(self, pool: Tensor, loc: Tensor, kv: Tensor) -> None:
        """Writes the rows of `kv`, `[T, 2, kv_heads, D]`, to the slots `loc` (`[T]`) of a layer's pool."""
        ...

    def plan_attention(self, batch: ForwardBatch, shape: AttentionShape, pool: Tensor) -> Any:
        """What `attention` of every layer of this forward needs, made once.  `pool` is any layer's."""
        ...

    def attention(self, q: Tensor, pool: Tensor, plan: Any) -> Tensor:
        """Causal attention of `q`, `[T, query_heads, D]`, to the slots of each token's request.

        Scores are scaled by `1 / sqrt(D)`; query heads that share a KV head are next to each other.  The KV
        of the forward's own tokens must be in the pool.  Returns `[T, query_heads * D]`.
        """
        ...


@runtime_checkable
class GraphKernels(Kernels, Protocol):
    """A backend whose decode can be captured in a CUDA graph: nothing in it looks at a value on the way."""

    def plan_for_graph(
        self, batch_size: int, kv_indices: Tensor, context_length: int, shape: AttentionShape, pool: Tensor
    ) -> Any:
        """A plan of decodes of `batch_size` requests, each of at most `context_length` tokens.

        Its tensors stay where they are; `kv_indices` (int32, as long as such a batch can need) is one of them,
        and may be shared by plans that are never used at a time.  It is fit for a run after `refill`.
        """
        ...

    def refill(self, plan: Any, paged: PagedKv) -> None:
        """Makes `plan` that of a batch of its size, without waiting for the device."""
        ...


@dataclass(frozen=True)
class Limits:
    """How far each row's distribution is narrowed, on the device of its logits."""

    top_k: Tensor
    """int64 [rows], 1 to the vocabulary size, which is no limit"""
    top_p: Tensor
    """float64 [rows], above 0, 1 for no limit; of what top-k leaves"""
    min_p: Tensor
    """float32 [rows, 1]; over the likeliest token's probability"""

    def at(self, rows: Tensor) -> Limits:
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


class SamplingKernels(Protocol):
    """The draw of `shared.layers.sampler` for rows that have a top-k or a top-p."""

    def draw_limited(self, scores: Tensor, weights: Tensor, keys: Tensor, limits: Limits) -> Tensor:
        """int64 `[rows]`: a token for each row, by the race that `Sampler` describes.

        `scores` are float32 `[rows, vocab]`, 0 at their largest; `weights` are `exp(scores)`, which may be
        written over; `keys` are those of `shared.layers.noise`, `[rows, 2]`.
        """
        ...
