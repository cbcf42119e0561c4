"""Output tokens per second for 1 and 32 requests, beside `transformers` `generate` on the same work.

    python -m bench.throughput [--stage 1] [--rounds 3] [-- SERVER FLAGS]

The work: greedy, EOS ignored, 128 prompt tokens, 64 new ones, prompts that no cache has seen, prompt time
included.  The two take turns, because a shared machine drifts; what counts is the ratio of each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.server_process import ServerProcess, end_on_sigterm
from shared.weights.model_config import ModelConfig
from shared.weights.prepare import DEFAULT_MODEL, prepare_model

PROMPT_TOKENS = 128
NEW_TOKENS = 64
BATCH_SIZES = (1, 32)

Prompts = list[list[int]]
Generate = Callable[[Prompts], Prompts]


@dataclass
class Measured:
    """Output tokens per second of every round, for one number of requests."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    """Share of requests whose answers were the same tokens, 0 to 1."""


def fresh_prompts(count: int, vocab_size: int, rng: np.random.Generator) -> Prompts:
    """Random ids: no two prompts share a prefix worth caching."""
    return [rng.integers(100, vocab_size, PROMPT_TOKENS).tolist() for _ in range(count)]


def server_generate(url: str) -> Generate:
    """Sends every prompt as a request of its own, all at once."""
    client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))

    def one(prompt: list[int]) -> list[int]:
        sampling_params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        response = client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling_params})
        response.raise_for_status()
        ids: list[int] = response.json()["output_ids"]
        return ids

    def generate(prompts: Prompts) -> Prompts:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))

    return generate


def peer_generate(url: str) -> Generate:
    """The same of an OpenAI-compatible server.  It answers in text, so what comes back are places without ids."""
    client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def one(prompt: list[int]) -> list[int]:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        response = client.post("/v1/completions", json=body)
        response.raise_for_status()
        return [-1] * int(response.json()["usage"]["completion_tokens"])

    def generate(prompts: Prompts) -> Prompts:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))

    return generate


def transformers_generate(folder: str) -> Generate:
    """`generate` of `transformers` in this process, one static batch, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompts: Prompts) -> Prompts:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers: Prompts = out[:, PROMPT_TOKENS:].tolist()
        return answers

    return generate


def timed(generate: Generate, prompts: Prompts) -> tuple[float, Prompts]:
    """Output tokens per second, and the answers.  Raises where an answer has the wrong length."""
    start = time.perf_counter()
    answers = generate(prompts)
    seconds = time.perf_counter() - start
    if any(len(answer) != NEW_TOKENS for answer in answers):
        raise RuntimeError("an answer has the wrong number of tokens")
    return NEW_TOKENS * len(prompts) / seconds, answers


def measure(ours: Generate, theirs: Generate, vocab_size: int, rounds: int) -> dict[int, Measured]:
    """Both in turn, after one round that does not count."""
    rng = np.random.default_rng(0)
    measured = {size: Measured() for size in BATCH_SIZES}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rounds", total=rounds + 1)
        for round in range(rounds + 1):
            for size in BATCH_SIZES:
                prompts = fresh_prompts(size, vocab_size, rng)
                our_rate, our_answers = timed(ours, prompts)
                their_rate, their_answers = timed(theirs, prompts)
                if round:
                    same = [a == b for a, b in zip(our_answers, their_answers, strict=True)]
                    measured[size].ours.append(our_rate)
                    measured[size].theirs.append(their_rate)
                    measured[size].agreement.append(sum(same) / size)
            progress.advance(task)
    return measured


def show(measured: dict[int, Measured], stage: int) -> Table:
    """Medians, with the range over rounds."""
    table = Table(title=f"output tokens/s, {PROMPT_TOKENS} in, {NEW_TOKENS} out, greedy")
    for column in ("requests", f"stage {stage}", "transformers", "ratio", "same answers"):
        table.add_column(column, justify="right")
    for size, m in measured.items():
        ratios = [ours / theirs for ours, theirs in zip(m.ours, m.theirs, strict=True)]
        cells = [spread(m.ours, ".1f"), spread(m.theirs, ".1f"), spread(ratios, ".2f")]
        table.add_row(str(size), *cells, f"{statistics.mean(m.agreement):.0%}")
    return table


def spread(values: list[float], form: str) -> str:
    """`median (smallest-largest)`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3, 4), default=1)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args(argv)
    end_on_sigterm()
    folder = prepare_model(args.model)
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    theirs = transformers_generate(str(folder))
    flags = ["--model-path", str(folder), "--sleep-on-idle", *args.flags]  # quiet while the other has its turn
    with ServerProcess(args.stage, flags) as server:
        measured = measure(server_generate(server.url), theirs, vocab_size, args.rounds)
    Console().print(show(measured, args.stage))
    return 0


if __name__ == "__main__":
    sys.exit(main())
