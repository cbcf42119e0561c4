"""ModelConfig against the configuration classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shared.weights.errors import ModelPreparationError
from shared.weights.model_config import ModelConfig
from tests.weights.gguf_files import FAMILIES

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**MINIMAL, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("family", FAMILIES.values())
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, f"{family}Config")(**MINIMAL)
    ours = ModelConfig.from_folder(write(tmp_path, architectures=[f"{family}ForCausalLM"]))
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling is None
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_biases_and_norms_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    for bias in (False, True):
        config = getattr(transformers, f"{family}Config")(**MINIMAL, attention_bias=bias, mlp_bias=bias)
        names = set(getattr(transformers, f"{family}ForCausalLM")(config).state_dict())
        ours = ModelConfig.from_folder(
            write(tmp_path, architectures=[f"{family}ForCausalLM"], attention_bias=bias, mlp_bias=bias)
        )
        assert ours.qkv_bias == ("model.layers.0.self_attn.k_proj.bias" in names)
        assert ours.o_bias == ("model.layers.0.self_attn.o_proj.bias" in names)
        assert ours.mlp_bias == ("model.layers.0.mlp.up_proj.bias" in names)
        assert ours.qk_norm == ("model.layers.0.self_attn.q_norm.weight" in names)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_is_read_in_old_and_new_spelling(given: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, **given))
    assert (config.rope_theta, config.rope_scaling) == (5e5, {"rope_type": "linear", "factor": 2.0})


def test_generation_config_says_what_ends_the_output(tmp_path: Path) -> None:
    assert ModelConfig.from_folder(write(tmp_path)).eos_token_ids == ()
    assert ModelConfig.from_folder(write(tmp_path, eos_token_id=7)).eos_token_ids == (7,)
    folder = write(tmp_path, {"eos_token_id": [8, 9], "bos_token_id": 3}, eos_token_id=7, bos_token_id=1)
    config = ModelConfig.from_folder(folder)
    assert (config.eos_token_ids, config.bos_token_id) == ((8, 9), 3)


def test_sliding_window_of_qwen_is_off_unless_all_layers_have_it(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 50, "num_key_value_heads": 2}
    assert ModelConfig.from_folder(write(tmp_path, **qwen)).sliding_window is None
    on = {**qwen, "use_sliding_window": True}
    assert ModelConfig.from_folder(write(tmp_path, **on, max_window_layers=0)).sliding_window == 50
    assert ModelConfig.from_folder(write(tmp_path, **on, max_window_layers=2)).sliding_window is None
    with pytest.raises(ModelPreparationError, match="some layers only"):
        ModelConfig.from_folder(write(tmp_path, **on, max_window_layers=1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Llama.*Qwen2.*Qwen3.*Mistral"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelPreparationError, match=says) as raised:
        ModelConfig.from_folder(write(tmp_path, **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", [None, "", "[]", "{broken"])
def test_a_config_that_cannot_be_read_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelPreparationError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
