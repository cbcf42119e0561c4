"""The Llama family: pre-norm decoder layers with RoPE, grouped-query attention and a gated MLP.

Llama and Mistral as they are, Qwen2 with a bias on q, k and v, Qwen3 with an RMSNorm on every head of q and
k.  Sizes in the shapes are this rank's share unless they say otherwise; `hidden` is never split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shared.kernels.base import AttentionShape, Kernels
from shared.layers.linear import ColumnParallelLinear, RowParallelLinear
from shared.layers.loader import WeightLoader
from shared.layers.rope import RotaryTable
from shared.layers.vocab_parallel import ParallelHead, VocabParallelEmbedding
from shared.parallel.partition import Partition, split_evenly
from shared.parallel.tp_group import TpGroup
from shared.weights.model_config import ModelConfig


@dataclass(frozen=True)
class Build:
    """What every layer of one rank is made from."""

    config: ModelConfig
    part: Partition
    loader: WeightLoader
    kernels: Kernels
    tp_group: TpGroup


@dataclass(frozen=True)
class ForwardInputs:
    """One forward on the device, shared by all layers."""

    input_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    out_cache_loc: Tensor
    """[T]"""
    last_tokens: Tensor | None
    """[bs] indices into T of each request's last token; None where every token is one (decode)"""
    attention_plan: Any
    """made by `Kernels.plan_attention`"""


class Attention:
    def __init__(self, build: Build, prefix: str) -> None:
        config, part, loader = build.config, build.part, build.loader
        self._kernels = build.kernels
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim
        self._query_heads = len(part.query_heads)
        self._kv_heads = len(part.kv_heads)
        query_rows, kv_rows = _rows(part.query_heads, config.head_dim), _rows(part.kv_heads, config.head_dim)
        rows_of = {f"{prefix}.q_proj": query_rows, f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}
        self._qkv = ColumnParallelLinear(loader, build.kernels, rows_of, config.qkv_bias)
        self._out = RowParallelLinear(
            loader, build.kernels, build.tp_group, f"{prefix}.o_proj", query_rows, config.o_bias
        )
        self._q_norm = loader.whole(f"{prefix}.q_norm.weight") if config.qk_norm else None
        self._k_norm = loader.whole(f"{prefix}.k_norm.weight") if config.qk_norm else None

    def __call__(self, x: Tensor, inputs: ForwardInputs, cos: Tensor, sin: Tensor, pool: Tensor) -> Tensor:
        """`[T, hidden]` to the same.  Stores the KV of all tokens before any of them attends."""
        num_tokens, kernels = x.shape[0], self._kernels
        heads = self._qkv(x).view(num_tokens, self._query_heads + 2 * self._kv_heads, self._head_dim)
        q = heads[:, : self._query_heads]
        if self._q_norm is not None and self._k_norm is not None:
            k = heads[:, self._query_heads : -self._kv_heads]
            q.copy_(kernels.rms_norm(q, self._q_norm, self._eps))
            k.copy_(kernels.rms_norm(k, self._k_norm, self._eps))
        kernels.rope(heads[:, : -self._kv_heads], cos, sin)
        kv = heads[:, self._query_heads :].view(num_tokens, 2, self._kv_heads, self._head_dim)
        kernels.store_kv(pool, inputs.out_cache_loc, kv)
        return self._out(kernels.attention(q, pool, inputs.attention_plan))


class MLP:
    def __init__(self, build: Build, prefix: str) -> None:
        loader, rows, has_bias = build.loader, build.part.intermediate, build.config.mlp_bias
        self._kernels = build.kernels
        rows_of = {f"{prefix}.gate_proj": rows, f"{prefix}.up_proj": rows}
        self._gate_up = ColumnParallelLinear(loader, build.kernels, rows_of, has_bias)
        self._down = RowParallelLinear(loader, build.kernels, build.tp_group, f"{prefix}.down_proj", rows, has_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, hidden]` to the same."""
        return self._down(self._kernels.silu_and_mul(self._gate_up(x)))


class DecoderLayer:
    def __init__(self, build: Build, prefix: str) -> None:
        self._kernels = build.kernels
        self._eps = build.config.rms_norm_eps
        self._attention_norm = build.loader.whole(f"{prefix}.input_layernorm.weight")
        self._mlp_norm = build.loader.whole(f"{prefix}.post_attention_layernorm.weight")
        self._attention = Attention(build, f"{prefix}.self_attn")
        self._mlp = MLP(build, f"{prefix}.mlp")

    def attend(
        self,
        x: Tensor | None,
        residual: Tensor,
        inputs: ForwardInputs,
        cos: Tensor,
        sin: Tensor,
        pool: Tensor,
    ) -> Tensor:
        """The layer's first half.  `residual`, `[T, hidden]`, runs through all layers and is added to in place.

        `x` is what the half before gives to be added to it (None for the first); returned is the same for the next.
        """
        kernels = self._kernels
        if x is None:
            x = kernels.rms_norm(residual, self._attention_norm, self._eps)
        else:
            x = kernels.add_rms_norm(x, residual, self._attention_norm, self._eps)
        return self._attention(x, inputs, cos, sin, pool)

    def feed_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """The second half, likewise."""
        return self._mlp(self._kernels.add_rms_norm(x, residual, self._mlp_norm, self._eps))


class CausalLM:
    """A whole model, this rank's share of it."""

    def __init__(
        self,
        config: ModelConfig,
        num_positions: int,
        loader: WeightLoader,
        kernels: Kernels,
        tp_group: TpGroup,
    ) -> None:
        """Reads the weights.  Raises ValueError for a RoPE scaling that is not supported."""
        part = Partition.of(config, tp_group.rank, tp_group.size)
        build = Build(config, part, loader, kernels, tp_group)
        self.attention_shape = AttentionShape(
            len(part.query_heads), len(part.kv_heads), config.head_dim, config.sliding_window
        )
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._rotary = RotaryTable(config, num_positions, loader.dtype, loader.device)
        embedding = loader.rows("model.embed_tokens.weight", part.vocab)
        head = embedding if config.tie_word_embeddings else loader.rows("lm_head.weight", part.vocab)
        self._embed = VocabParallelEmbedding(embedding, part.vocab, tp_group)
        self._layers = [DecoderLayer(build, f"model.layers.{index}") for index in range(config.num_hidden_layers)]
        self._norm = loader.whole("model.norm.weight")
        widths = [len(vocab) for vocab in split_evenly(config.vocab_size, tp_group.size)]
        self._head = ParallelHead(head, widths, tp_group, kernels)

    def forward(self, inputs: ForwardInputs, pools: list[Tensor]) -> Tensor:
        """Logits `[bs, vocab]` of each request's last token, the whole vocabulary on every rank.

        `pools` holds each layer's KV, which this writes.
        """
        cos, sin = self._rotary.at(inputs.positions)
        residual = self._embed(inputs.input_ids)
        x: Tensor | None = None
        for layer, pool in zip(self._layers, pools, strict=True):
            x = layer.attend(x, residual, inputs, cos, sin, pool)
            if layer is self._layers[-1] and inputs.last_tokens is not None:
                # All KV is stored: from here on only the tokens that are sampled from are of use.
                x, residual = (rows.index_select(0, inputs.last_tokens) for rows in (x, residual))
            x = layer.feed_forward(x, residual)
        if x is not None:
            residual += x
        return self._head(self._kernels.rms_norm(residual, self._norm, self._eps))


def _rows(heads: range, head_dim: int) -> range:
    """The rows of a projection that make `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)
