"""A converted .gguf file against the model it was made of and against transformers' own reader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.weights import smollm2
from shared.weights.errors import ModelPreparationError
from shared.weights.files import WeightFiles
from shared.weights.gguf_convert import convert_gguf
from shared.weights.model_config import ModelConfig
from shared.weights.prepare import prepare_model
from shared.weights.tokenizer import load_tokenizer
from tests.weights.gguf_files import FAMILIES, HIDDEN, TOKENS, close, random_model, write_gguf

TEXTS = [
    "the thing",
    "  the   the ",
    "a\n\nb\n\n\n c\t",
    "I'll, you'LL don't",
    "Grüße, 世界 🦙👩‍👩‍👧 ا",
    "<|im_start|>user\nhi<|im_end|>",
    "a<|im_end|> the",
    "<think>the</think>",
    "",
    "e\u0301 caf\u00e9",
]
NUMBERS = ["1234 123 12", "x1y22 4 44", "½ ½½ ²"]


def convert(path: Path) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    convert_gguf(path, folder, lambda what, done, total: None)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = WeightFiles(folder)
    return {name: files.get(name) for name in files.names()}


def assert_same_tensors(ours: dict[str, torch.Tensor], model: Any) -> None:
    theirs = model.state_dict()
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert np.array_equal(tensor.numpy(), theirs[name].numpy(), equal_nan=True), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config_are_those_of_the_original_model(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", family, model)
    folder = convert(tmp_path / "m.gguf")
    model.save_pretrained(tmp_path / "original")
    assert_same_tensors(tensors_of(folder), model)
    ours, original = ModelConfig.from_folder(folder), ModelConfig.from_folder(tmp_path / "original")
    if family == "mistral":
        original = dataclasses.replace(original, architecture="LlamaForCausalLM", sliding_window=None)
    assert ours == original


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_what_transformers_reads_from_the_file(family: str, tmp_path: Path) -> None:
    # transformers knows no head width but 128 for a Qwen3 in a .gguf file.
    model = random_model(family, **({"head_dim": 128} if family == "qwen3" else {}))
    write_gguf(tmp_path / "m.gguf", family, model, GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert_same_tensors(tensors_of(convert(tmp_path / "m.gguf")), theirs)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_every_kind_of_quantisation_is_read(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", random_model("qwen2"), GGMLQuantizationType[kind])
    ours = tensors_of(convert(tmp_path / "m.gguf"))
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    down = tensors["blk.1.ffn_down.weight"]
    assert down.tensor_type.name == kind
    expected = dequantize(down.data, down.tensor_type).astype(np.float32).reshape(HIDDEN, 512)
    assert np.array_equal(ours["model.layers.1.mlp.down_proj.weight"].numpy(), expected, equal_nan=True)


def test_biases_of_llama_are_found_and_put_in_order(tmp_path: Path) -> None:
    model = random_model("llama", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "m.gguf", "llama", model)
    folder = convert(tmp_path / "m.gguf")
    assert_same_tensors(tensors_of(folder), model)
    config = ModelConfig.from_folder(folder)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)


def test_rope_scaling_of_llama_3_is_recovered_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_model("llama", rope_parameters={"rope_theta": 500000.0, **scaling})
    dim = model.config.head_dim
    plain = 500000.0 ** -(np.arange(0, dim, 2) / dim)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", "llama", model, extra_tensors={"rope_freqs.weight": factors})
    folder = convert(tmp_path / "m.gguf")
    assert ModelConfig.from_folder(folder).rope_scaling == scaling
    assert_same_tensors(tensors_of(folder), model)
    write_gguf(tmp_path / "odd.gguf", "llama", model, extra_tensors={"rope_freqs.weight": factors + 1})
    with pytest.raises(ModelPreparationError, match="rope_freqs"):
        convert(tmp_path / "odd.gguf")


def test_end_of_turn_ends_the_output_too(tmp_path: Path) -> None:
    writer_of_eot = GGUFWriter.add_pad_token_id
    model = random_model("qwen3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_pad_token_id", lambda w, i: (writer_of_eot(w, i), w.add_eot_token_id(0)))
        write_gguf(tmp_path / "m.gguf", "qwen3", model)
    assert ModelConfig.from_folder(convert(tmp_path / "m.gguf")).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("empty", "not a whole"),
        ("text", "not a whole"),
        ("truncated", "not a whole"),
        ("gpt2", "'gpt2' is not supp"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(broken: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen2", random_model("qwen2"))
    if broken == "gpt2":
        close(GGUFWriter(path, "gpt2"))
    contents = {"empty": b"", "text": b"hello, world", "truncated": path.read_bytes()[:-1000]}
    path.write_bytes(contents.get(broken, path.read_bytes()))
    with pytest.raises(ModelPreparationError, match=says) as raised:
        convert(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "tekken"])
def test_byte_level_ids_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", random_model("qwen2"), pre=pre)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = load_tokenizer(convert(tmp_path / "m.gguf"))
    for text in [*TEXTS[:-1], *NUMBERS]:
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        assert ours.decode(ids) == text
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 0)
    assert len(ours) == len(TOKENS)
    assert ours.chat_template == theirs.chat_template


def test_smollm_splits_every_digit(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", random_model("llama"), pre="smollm")
    ours = load_tokenizer(convert(tmp_path / "m.gguf"))
    assert ours.tokenize("1234 the 4½") == ["1", "2", "3", "4", "Ġthe", "Ġ", "4", "Â½"]
    for text in [*TEXTS, *NUMBERS]:
        assert ours.decode(ours(text).input_ids) == text


def test_an_unknown_way_to_cut_text_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", random_model("llama"), pre="never-heard-of")
    with pytest.raises(ModelPreparationError, match=r"never-heard-of.*supported are smollm"):
        convert(tmp_path / "m.gguf")


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    pieces = ["▁the", "▁t", "he", "in", "▁", *"theing world,.", "▁wor", "ld", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(pieces)]
    model = random_model("llama", vocab_size=len(tokens))

    def add_tokenizer(writer: GGUFWriter, pre: str) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
        writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.weights.gguf_files.add_byte_level_tokenizer", add_tokenizer)
        write_gguf(tmp_path / "m.gguf", "llama", model)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = load_tokenizer(convert(tmp_path / "m.gguf"))
    for text in ["the world", "the  world", "Grüße 🦙\n\tthe", "nothing."]:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids, text
        assert ids[0] == 1
        assert ours.decode(ids, skip_special_tokens=True) == text
    # The prefix comes before a space too, as in the tokenizer.json of Llama 2.
    assert ours.convert_ids_to_tokens(ours(" in").input_ids) == ["<s>", "▁", "▁", "in"]
    assert ours.decode(ours(" in").input_ids, skip_special_tokens=True) == " in"


def test_the_default_model_is_what_transformers_reads_from_its_gguf(tmp_path: Path) -> None:
    gguf = smollm2.fetch_gguf(tmp_path, lambda what, done, total: None)
    folder = prepare_model("SmolLM2-135M-Instruct", show_progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name, dtype=torch.float32)
    assert_same_tensors(tensors_of(folder), theirs)
    config = ModelConfig.from_folder(folder)
    assert (config.num_attention_heads, config.num_key_value_heads, config.rope_theta) == (9, 3, 100000.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_the_default_tokenizer_is_that_of_smollm2() -> None:
    tokenizer = load_tokenizer(prepare_model("SmolLM2-135M-Instruct", show_progress=False))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12½?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12½?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(chat, add_special_tokens=False).input_ids
    assert ids[0] == 1 and ids.count(2) == 2
    assert tokenizer.tokenize("in 12 ½") == ["in", "Ġ", "1", "2", "Ġ", "Â½"]
    for text in [*TEXTS, *NUMBERS]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
