"""A model of a given size with random weights, made on the spot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.weights.tiny_random import write_tiny_random


@dataclass(frozen=True)
class ModelSize:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def multiplied_weights(self) -> int:
        """Weights that every token is multiplied with: all but the embedding."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    @property
    def kv_values_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim


ONE_BILLION = ModelSize(hidden=2048, layers=16, heads=32, kv_heads=8, intermediate=8192, vocab=32_000)
SMALL = ModelSize(hidden=128, layers=2, heads=2, kv_heads=1, intermediate=192, vocab=500)


def write_model(folder: Path, size: ModelSize, device: str) -> None:
    """A Llama of `size` in bfloat16, with the tokenizer of `tiny-random` (most ids have no text)."""
    write_tiny_random(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(size, device), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(size: ModelSize, device: str) -> dict[str, Tensor]:
    """Scaled as those of `tiny-random`, so that greedy text depends on the context and its choices are clear."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int, gain: float) -> Tensor:
        weights = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        return weights.mul_(gain / columns**0.5).cpu()

    query, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    ones = torch.ones(size.hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": draw(size.vocab, size.hidden, 0.25), "model.norm.weight": ones.clone()}
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = ones.clone()
        weights[prefix + "post_attention_layernorm.weight"] = ones.clone()
        weights[prefix + "self_attn.q_proj.weight"] = draw(query, size.hidden, 1.2)
        weights[prefix + "self_attn.k_proj.weight"] = draw(kv, size.hidden, 1.2)
        weights[prefix + "self_attn.v_proj.weight"] = draw(kv, size.hidden, 1.5)
        weights[prefix + "self_attn.o_proj.weight"] = draw(size.hidden, query, 0.7)
        weights[prefix + "mlp.gate_proj.weight"] = draw(size.intermediate, size.hidden, 1.2)
        weights[prefix + "mlp.up_proj.weight"] = draw(size.intermediate, size.hidden, 1.2)
        weights[prefix + "mlp.down_proj.weight"] = draw(size.hidden, size.intermediate, 3.0)
    weights["lm_head.weight"] = draw(size.vocab, size.hidden, 4.0)
    return weights
