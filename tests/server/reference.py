"""What the servers must answer: greedy tokens of `transformers`, sampled ones of the engine alone."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from shared.executor.engine_step import EngineStep
from shared.executor.rank import load_rank
from shared.messages import BatchTokenIDOut, PortArgs, SamplingParams, TokenizedGenerateReqInput
from shared.server_args import ServerArgs
from shared.weights.prepare import prepare_model
from shared.weights.tokenizer import load_tokenizer

_STORY = "Once upon a time a scheduler met a router, and they agreed on everything but the order of things. "
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "def fibonacci(n):\n    ",
    "Grüße, 世界! 🦙",
    "x",
    _STORY + "The router spoke first:",
    _STORY + "The scheduler spoke first:",
    "A list of things: apples, pears, and",
    _STORY * 2,
    "   leading and trailing spaces   ",
]
NEW_TOKENS = 24


def folder(model: str) -> Path:
    return prepare_model(model, show_progress=False)


@functools.cache
def greedy(model: str, prompts: tuple[str, ...] = tuple(PROMPTS), new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy continuations by `transformers` in float32, one prompt at a time, EOS ignored."""
    tokenizer = load_tokenizer(folder(model))
    hf = AutoModelForCausalLM.from_pretrained(folder(model), dtype=torch.float32)
    hf.eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@functools.cache
def sampled(model: str, temperature: float, top_p: float, top_k: int, run_dir: str) -> list[list[int]]:
    """The engine's own tokens for every prompt with its index as seed, each alone, without a server."""
    args = ServerArgs(model_path=str(folder(model)), disable_radix_cache=True, max_total_tokens=4096)
    ports = PortArgs(run_dir, "", "", "", b"")
    engine = EngineStep(load_rank(args, ports, 0), decode_steps=1, cut_on_stream=False)
    tokenizer = load_tokenizer(folder(model))
    answers = []
    for seed, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_new_tokens=NEW_TOKENS,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            ignore_eos=True,
        )
        ids = np.array(tokenizer.encode(prompt), dtype=np.int64)
        outputs = engine.step([TokenizedGenerateReqInput(str(seed), ids, params)])
        while not engine.idle:
            outputs += engine.step([])
        answers.append([t for out in outputs if isinstance(out, BatchTokenIDOut) for t in out.new_ids[0]])
    return answers
