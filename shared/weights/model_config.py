"""What the model code needs to know of a model, read from `config.json` and `generation_config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.weights.errors import ModelPreparationError

SUPPORTED_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
)

# What `transformers` takes for a key that a config.json leaves out.
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model."""

    architecture: str  # one of SUPPORTED_ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # has "rope_type"; None for plain RoPE
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on each head of q and k before RoPE (Qwen3)
    sliding_window: int | None  # a token sees itself and the window - 1 tokens before it; None for all
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # generation_config.json's, else config.json's

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """The configuration of a folder in Hugging Face layout.

        Raises ModelPreparationError for an architecture, activation or quantisation that is not supported
        and for a file that is missing or broken.
        """
        folder = Path(folder)
        path = folder / "config.json"
        raw = read_json(path)
        architecture = _architecture(raw, path)
        merged = {**_DEFAULTS[architecture], **raw}
        if merged.get("hidden_act", "silu") != "silu":
            raise ModelPreparationError(f"{path}: hidden_act {merged['hidden_act']!r} is not supported, only 'silu'")
        if merged.get("quantization_config"):
            raise ModelPreparationError(
                f"{path}: quantised checkpoints are not supported; use the unquantised model or a .gguf file"
            )
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}

        num_heads = _number(merged, "num_attention_heads", path)
        hidden_size = _number(merged, "hidden_size", path)
        attention_bias = bool(merged.get("attention_bias", False))
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        has_bias_switch = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        rope_theta, rope_scaling = _rope(merged)
        return cls(
            architecture=architecture,
            vocab_size=_number(merged, "vocab_size", path),
            hidden_size=hidden_size,
            intermediate_size=_number(merged, "intermediate_size", path),
            num_hidden_layers=_number(merged, "num_hidden_layers", path),
            num_attention_heads=num_heads,
            num_key_value_heads=int(merged.get("num_key_value_heads") or num_heads),
            head_dim=int(merged.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(merged.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_number(merged, "max_position_embeddings", path),
            tie_word_embeddings=bool(merged.get("tie_word_embeddings", False)),
            qkv_bias=is_qwen2 or (has_bias_switch and attention_bias),
            o_bias=has_bias_switch and attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(merged.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_sliding_window(architecture, merged, path),
            bos_token_id=_first(generation.get("bos_token_id", merged.get("bos_token_id"))),
            eos_token_ids=_ids(generation.get("eos_token_id", merged.get("eos_token_id"))),
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.  Raises ModelPreparationError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelPreparationError(f"{path} does not exist; a model folder needs it") from None
    except (OSError, ValueError) as error:
        raise ModelPreparationError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelPreparationError(f"{path} does not hold a JSON object")
    return value


def _architecture(raw: dict[str, Any], path: Path) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    given = ", ".join(map(str, names)) or f"none given (model_type {raw.get('model_type')!r})"
    raise ModelPreparationError(
        f"{path}: architecture {given} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _number(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelPreparationError(f"{path}: {key} is {value!r}, a positive integer is needed")
    return value


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type == "default":
        return theta, None
    return theta, {"rope_type": rope_type, **parameters}


def _sliding_window(architecture: str, config: dict[str, Any], path: Path) -> int | None:
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return None
    if architecture == "MistralForCausalLM":
        return int(window)
    if not config.get("use_sliding_window", False):
        return None
    num_layers = _number(config, "num_hidden_layers", path)
    first_sliding = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(num_layers)
    ]
    if "sliding_attention" not in kinds:
        return None
    if "full_attention" in kinds:
        raise ModelPreparationError(f"{path}: a sliding window on some layers only is not supported")
    return int(window)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _first(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None
