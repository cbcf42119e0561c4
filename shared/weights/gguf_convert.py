"""A .gguf file becomes a folder in Hugging Face layout, in float32.

Names of metadata and tensors are llama.cpp's, see the GGUF specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shared.weights.errors import ModelPreparationError
from shared.weights.gguf_tokenizer import write_gguf_tokenizer
from shared.weights.progress import Report
from shared.weights.safetensors_writer import write_safetensors

if TYPE_CHECKING:
    from gguf import ReaderTensor

# "llama" is also what llama.cpp calls a Mistral, and runs it as, without a sliding window.
_ARCHITECTURES: Final = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_TOP_LEVEL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"  # Llama 3's scaling of the frequencies, one factor each


def convert_gguf(gguf_path: Path, folder: Path, report: Report) -> None:
    """Writes config, generation config, tokenizer and weights of `gguf_path` into an empty folder.

    Any quantisation that the gguf package can dequantise is read.  Raises ModelPreparationError for a file
    that is broken, split, or of an architecture that is not supported.
    """
    from gguf import GGUFReader

    report("converting", 0, 1)
    try:
        reader = GGUFReader(gguf_path)
    except Exception as error:  # a truncated file shows as whatever numpy or the parser stumbles over
        raise ModelPreparationError(f"{gguf_path} is not a whole GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(metadata, tensors)
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(metadata))
        write_gguf_tokenizer(metadata, folder, config["max_position_embeddings"])
        _write_weights(tensors, config, folder, report)
    except KeyError as error:
        raise ModelPreparationError(f"{gguf_path} lacks {error}") from error
    except (ValueError, NotImplementedError) as error:
        raise ModelPreparationError(f"{gguf_path}: {error}") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """The config.json that the model had before it became a GGUF file."""
    name = metadata["general.architecture"]
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"architecture {name!r} is not supported; supported are {', '.join(_ARCHITECTURES)} (a Mistral is a llama)"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError("it is one part of several; join them with llama.cpp's gguf-split --merge first")
    if metadata.get(f"{name}.expert_count", 0) > 0:
        raise ValueError("mixtures of experts are not supported")
    architecture, model_type = _ARCHITECTURES[name]
    heads = int(metadata[f"{name}.attention.head_count"])
    vocab_size, hidden_size = _shape(tensors["token_embd.weight"])
    rope_width = metadata.get("llama.rope.dimension_count")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata[f"{name}.feed_forward_length"]),
        "num_hidden_layers": int(metadata[f"{name}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get(f"{name}.attention.head_count_kv", heads)),
        "head_dim": int(metadata.get(f"{name}.attention.key_length") or rope_width or hidden_size // heads),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(metadata[f"{name}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get(f"{name}.rope.freq_base", 10000.0)),
        "max_position_embeddings": int(metadata[f"{name}.context_length"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }
    if name == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    if scaling := _rope_scaling(name, metadata, tensors, config):
        config["rope_scaling"] = scaling
    return config


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts the fastest dimension first


def _shortest(value: float) -> float:
    """1e-05 for the float32 9.999999747378752e-06: what was written in the config.json it came from."""
    return float(str(np.float32(value)))


def _rope_scaling(
    name: str, metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    if _ROPE_FACTORS in tensors:
        return _llama3_scaling(_dequantized(tensors[_ROPE_FACTORS]), config)
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"RoPE scaling {kind!r} is not supported; supported are linear, yarn and Llama 3's")
    scaling = {"rope_type": kind, "factor": _shortest(metadata[f"{name}.rope.scaling.factor"])}
    if kind == "yarn":
        original = metadata[f"{name}.rope.scaling.original_context_length"]
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _llama3_scaling(factors: NDArray[np.float32], config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3's parameters from the factors that llama.cpp computed with them.

    Only the largest factor differs between the released models (8 in 3.1, 32 in 3.2); the others are taken as
    they are there, and checked.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    dim = config["head_dim"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1.0 / ((1.0 - share) / factor + share), factors, rtol=1e-3):
        raise ValueError(f"{_ROPE_FACTORS} does not follow Llama 3's RoPE scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A chat model may end a turn with another token than a text: both end the output."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _write_weights(
    tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any], folder: Path, report: Report
) -> None:
    source_of = {_hf_name(name): name for name in tensors if name != _ROPE_FACTORS}
    permuted_heads = {}
    if config["model_type"] == "llama":
        permuted_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    done = 0

    def produce(hf_name: str) -> NDArray[np.float32]:
        nonlocal done
        report("converting", done, len(source_of))
        done += 1
        name = source_of[hf_name]
        tensor = _dequantized(tensors[name])
        heads = permuted_heads.get(name.split(".")[-2])
        return tensor if heads is None else _undo_permutation(tensor, heads)

    shapes = {hf_name: _shape(tensors[name]) for hf_name, name in source_of.items()}
    write_safetensors(folder / "model.safetensors", shapes, produce)
    report("converting", len(source_of), len(source_of))


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, kind, suffix = match.groups()
        if kind in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[kind]}.{suffix}"
    elif match := re.fullmatch(r"(\w+)\.(weight|bias)", name):
        kind, suffix = match.groups()
        if kind in _TOP_LEVEL:
            return f"{_TOP_LEVEL[kind]}.{suffix}"
    raise ValueError(f"tensor {name!r} has no place in the supported architectures")


def _dequantized(tensor: ReaderTensor) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(_shape(tensor))


def _undo_permutation(tensor: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k, `[num_heads * head_dim, ...]`, from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring pairs of a head, Hugging Face its first half with its second; llama.cpp's
    converter therefore stores the halves interleaved.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    halves: NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(tensor.shape)
    return halves
