"""The built-in random model: equal everywhere, and fit for tests that compare greedy text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.weights.model_config import ModelConfig
from shared.weights.prepare import prepare_model
from shared.weights.tokenizer import load_tokenizer

PROMPTS = ["Hello", "The capital of France is", "1 2 3 4", "a a a a a", "def f(x):\n"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_model("tiny-random", show_progress=False)


def test_weights_are_the_same_on_every_machine(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "28d03f5d9da7c86b458bc66a6a87eaaf156d05ca573bbb98bf4c596d77c22d8d"


def test_shapes_are_those_that_tests_count_on(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 4)
    assert config.max_position_embeddings >= 4096
    assert config.eos_token_ids == (2,)
    assert config.vocab_size == len(load_tokenizer(folder))


def test_greedy_text_varies_and_has_no_near_ties(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    texts = set()
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        made = model.generate(
            ids, max_new_tokens=100, do_sample=False, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        new_ids = made.sequences[0, ids.shape[1] :].tolist()
        best, second = torch.cat(made.logits).topk(2).values.T
        assert len(set(new_ids)) > 40
        assert (best - second).min() > 1e-3
        texts.add(tokenizer.decode(new_ids))
    assert len(texts) == len(PROMPTS)


def test_its_tokenizer_gives_back_any_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for text in [
        "",
        " ",
        "the thing and the other",
        "Grüße, 世界 🦙👩‍👩‍👧 ا\n\t\x00",
        "<|im_start|>user\nhi<|im_end|>",
    ]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids[::2] == [1, 2]
    assert len(tokenizer(" the").input_ids) == 1
    assert [len(tokenizer.decode([index])) for index in range(tokenizer.vocab_size)].count(0) == 0


def test_its_tokenizer_is_also_what_transformers_finds(folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert theirs(PROMPTS).input_ids == ours(PROMPTS).input_ids
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
