"""`tiny-random`: a Llama of 185 thousand weights made from a seed, for tests and labs.

Eight query heads on four key/value heads, so that tensor parallelism of 1 to 4 has something to split, and a
vocabulary of 291, which neither two nor four ranks divide evenly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shared.weights.safetensors_writer import write_safetensors
from shared.weights.tokenizer import save_tokenizer

SEED: Final = 20240117
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES: Final = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "n d", "o u", "e s", "o r",
    "i t", "i s", "Ġ c", "e n", "Ġ o", "in g", "a n", "a l", "Ġ b", "e d", "Ġ f", "Ġ p", "a r", "l l",
    "Ġa nd", "v e", "u t",
)  # fmt: skip
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

VOCAB_SIZE: Final = len(SPECIAL_TOKENS) + 256 + len(MERGES)
HIDDEN_SIZE: Final = 64
INTERMEDIATE_SIZE: Final = 128
NUM_LAYERS: Final = 4
NUM_HEADS: Final = 8
NUM_KV_HEADS: Final = 4
HEAD_DIM: Final = HIDDEN_SIZE // NUM_HEADS
MAX_POSITION_EMBEDDINGS: Final = 8192


def write_tiny_random(folder: Path) -> None:
    """Writes config, tokenizer and weights into an empty folder: the same on every machine."""
    tensors = _tensors()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", shapes, tensors.__getitem__)
    _write_json(folder / "config.json", _config())
    token_ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    _write_json(folder / "generation_config.json", token_ids)
    _write_tokenizer(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def _tensors() -> dict[str, NDArray[np.float32]]:
    """Weights drawn uniformly, each matrix of a standard deviation of `gain / sqrt(fan in)`.

    The gains make what the layers add outweigh the embedding, so that greedy text depends on the context
    instead of circling, while float32 rounding stays far below the usual distance of the best two logits.
    """
    # The raw stream of a bit generator is the only one that numpy keeps equal across versions and machines.
    bits = np.random.PCG64(SEED)

    def draw(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        fraction = (bits.random_raw(rows * columns) >> np.uint64(40)).astype(np.float32) / np.float32(2**23)
        scale = np.float32(gain * (3.0 / columns) ** 0.5)
        weights: NDArray[np.float32] = (fraction - np.float32(1.0)) * scale
        return weights.reshape(rows, columns)

    query, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    ones = np.ones(HIDDEN_SIZE, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": draw(VOCAB_SIZE, HIDDEN_SIZE, 0.25)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = ones
        tensors[prefix + "self_attn.q_proj.weight"] = draw(query, HIDDEN_SIZE, 1.2)
        tensors[prefix + "self_attn.k_proj.weight"] = draw(kv, HIDDEN_SIZE, 1.2)
        tensors[prefix + "self_attn.v_proj.weight"] = draw(kv, HIDDEN_SIZE, 1.5)
        tensors[prefix + "self_attn.o_proj.weight"] = draw(HIDDEN_SIZE, query, 0.7)
        tensors[prefix + "post_attention_layernorm.weight"] = ones
        tensors[prefix + "mlp.gate_proj.weight"] = draw(INTERMEDIATE_SIZE, HIDDEN_SIZE, 1.2)
        tensors[prefix + "mlp.up_proj.weight"] = draw(INTERMEDIATE_SIZE, HIDDEN_SIZE, 1.2)
        tensors[prefix + "mlp.down_proj.weight"] = draw(HIDDEN_SIZE, INTERMEDIATE_SIZE, 3.0)
    tensors["model.norm.weight"] = ones
    tensors["lm_head.weight"] = draw(VOCAB_SIZE, HIDDEN_SIZE, 4.0)
    return tensors


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 256 bytes and a few merges; it adds no token of its own to a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokens += [left + right for left, right in pairs]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    save_tokenizer(folder, backend, roles, CHAT_TEMPLATE, model_max_length=MAX_POSITION_EMBEDDINGS)
