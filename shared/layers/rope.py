"""Rotary position embedding: the angles, with the ways in which models stretch them to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from shared.weights.model_config import ModelConfig


class RotaryTable:
    """cos and sin of every position below `num_positions`, as `shared.kernels` wants them."""

    def __init__(self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, scale = rotary_frequencies(config)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(device, dtype)
        self._sin = torch.cat([-sin, sin], dim=-1)[:, None].to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[T]` to cos and sin, `[T, 1, head_dim]` each."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position, float32 `[head_dim / 2]`, and the factor on cos and sin.

    Raises ValueError for a kind of scaling that is not implemented.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    kind = scaling["rope_type"]
    if kind not in _SCALINGS or scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"RoPE scaling {scaling} is not supported; rope_type can be {', '.join(_SCALINGS)}")
    return _SCALINGS[kind](frequencies, scaling, config)


def _linear(frequencies: Tensor, scaling: dict[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    """Positions divided by a factor (position interpolation, arXiv:2306.15595)."""
    return frequencies / scaling["factor"], 1.0


def _llama3(frequencies: Tensor, scaling: dict[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are slowed by the factor, short ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling["factor"]), 1.0


def _yarn(frequencies: Tensor, scaling: dict[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): blended by dimension, cos and sin scaled to keep the entropy of attention."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings

    def dimension_with(turns: float) -> float:
        """The dimension that makes so many turns over the original context."""
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = dimension_with(scaling.get("beta_fast") or 32)
    high = dimension_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    steps = torch.arange(config.head_dim // 2, dtype=torch.float32)
    kept = 1.0 - ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor), _yarn_scale(factor, scaling)


def _yarn_scale(factor: float, scaling: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(scaling["mscale"]) / scale(scaling["mscale_all_dim"])
    return scale(1.0)


_SCALINGS: Final[dict[str, Callable[[Tensor, dict[str, Any], ModelConfig], tuple[Tensor, float]]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
