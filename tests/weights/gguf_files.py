"""Random models written as .gguf files the way llama.cpp's converter does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from tokenizers import pre_tokenizers

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
GGUF_ARCHITECTURES = {"mistral": "llama"}  # llama.cpp files a Mistral under "llama"
HEADS, KV_HEADS, HIDDEN, LAYERS = 8, 4, 256, 2
BYTE_TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ 4", "Ċ Ċ", "Â ½", "Ġ Â½", "i n", "in g", "l l", "' ll"]
TOKENS = [*SPECIAL, *BYTE_TOKENS, *(merge.replace(" ", "") for merge in MERGES)]
TOKEN_TYPES = [3, 3, 3, 4] + [1] * (len(TOKENS) - len(SPECIAL))
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_model(family: str, **changes: Any) -> Any:
    """A `transformers` model of random float32 weights, none of them zero or one."""
    sizes = {
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**{**sizes, **changes})
    torch.manual_seed(5)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_gguf(
    path: Path,
    family: str,
    model: Any,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    extra_tensors: dict[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """Writes `model` with its matrices quantised as `kind`; kinds that gguf cannot make get random blocks."""
    config = model.config
    writer = GGUFWriter(path, GGUF_ARCHITECTURES.get(family, family))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim if hasattr(config, "head_dim") else HIDDEN // HEADS)
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
    add_byte_level_tokenizer(writer, pre)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        add_tensor(writer, gguf_name(name), permuted(family, name, tensor.numpy()), kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    close(writer)


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_level_tokenizer(writer: GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TOKEN_TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def add_tensor(writer: GGUFWriter, name: str, array: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> None:
    if array.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, array.copy())
        return
    try:
        blocks = quantize(array, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        shape = (array.shape[0], array.shape[1] // block * size)
        blocks = np.random.default_rng(len(name)).integers(0, 60, shape).astype(np.uint8)
    writer.add_tensor(name, blocks, raw_dtype=kind)


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.{suffix}"


def permuted(family: str, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """llama.cpp keeps q and k of its "llama" with the two halves of each head interleaved."""
    if family not in ("llama", "mistral") or not ("q_proj" in name or "k_proj" in name):
        return array
    heads = HEADS if "q_proj" in name else KV_HEADS
    rows = [row for head in np.split(np.arange(len(array)), heads) for row in head.reshape(2, -1).T.ravel()]
    return array[rows]
