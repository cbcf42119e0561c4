"""Output tokens per second for 1 and 32 requests, beside other engines on the same work.

    python -m bench.throughput [--stage 1 4] [--rounds 3] [--peer NAME=URL] [--markdown FILE] [-- SERVER FLAGS]

The work: greedy, EOS ignored, 128 prompt tokens, 64 new ones, prompts that no cache has seen, prompt time
included.  The engines are the stages asked for, `transformers` `generate`, and every peer, an OpenAI-compatible
server.  They take turns, because a shared machine drifts; what counts is the ratio of each round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench.plan import parse_peer
from bench.server_process import ServerProcess, end_on_sigterm
from bench.tables import show
from bench.this_machine import wait_until_quiet
from shared.weights.model_config import ModelConfig
from shared.weights.prepare import DEFAULT_MODEL, prepare_model

PROMPT_TOKENS = 128
NEW_TOKENS = 64
BATCH_SIZES = (1, 32)

Prompts = list[list[int]]
Generate = Callable[[Prompts], Prompts]


@dataclass
class Measured:
    """One engine at one number of requests, round by round."""

    rates: list[float] = field(default_factory=list)
    """Output tokens per second."""
    agreement: list[float] = field(default_factory=list)
    """Share of requests with the same tokens as the first engine's, 0 to 1; empty where an engine gives no ids."""


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
    """Output tokens per second on a quiet machine, and the answers.  Raises where an answer has the wrong length."""
    wait_until_quiet()
    start = time.perf_counter()
    answers = generate(prompts)
    seconds = time.perf_counter() - start
    if any(len(answer) != NEW_TOKENS for answer in answers):
        raise RuntimeError("an answer has the wrong number of tokens")
    return NEW_TOKENS * len(prompts) / seconds, answers


def measure(engines: dict[str, Generate], vocab_size: int, rounds: int) -> dict[tuple[int, str], Measured]:
    """All in turn, after one round that does not count.  Every round begins with another engine."""
    rng = np.random.default_rng(0)
    measured = {(size, name): Measured() for size in BATCH_SIZES for name in engines}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rounds", total=(rounds + 1) * len(measured))
        for round in range(rounds + 1):
            for size in BATCH_SIZES:
                prompts = fresh_prompts(size, vocab_size, rng)
                turn = list(engines)[round % len(engines) :] + list(engines)[: round % len(engines)]
                timings = {}
                for name in turn:
                    timings[name] = timed(engines[name], prompts)
                    progress.advance(task)
                if round:
                    _add(measured, size, timings)
    return measured


def _add(measured: dict[tuple[int, str], Measured], size: int, timings: dict[str, tuple[float, Prompts]]) -> None:
    first = next(name for _, name in measured)
    expected = timings[first][1]
    for name, (rate, answers) in timings.items():
        one = measured[size, name]
        one.rates.append(rate)
        if answers[0][0] >= 0:
            one.agreement.append(sum(a == b for a, b in zip(answers, expected, strict=True)) / size)


def rows(measured: dict[tuple[int, str], Measured]) -> list[list[str]]:
    """Medians, with the range over rounds; a ratio is the first engine's rate over this one's, round by round."""
    found = [["requests", "engine", "tokens/s", "ratio to it", "same answers"]]
    first = next(name for _, name in measured)
    for (size, name), one in measured.items():
        ratios = [ours / theirs for ours, theirs in zip(measured[size, first].rates, one.rates, strict=True)]
        same = f"{statistics.mean(one.agreement):.0%}" if one.agreement else ""
        found.append([str(size), name, spread(one.rates, ".1f"), spread(ratios, ".2f"), same])
    return found


def spread(values: list[float], form: str) -> str:
    """`median (smallest-largest)`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, nargs="+", choices=(1, 2, 3, 4), default=[1])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peer", action="append", default=[], type=parse_peer, metavar="NAME=URL")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to its place in FILE")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args(argv)
    end_on_sigterm()
    folder = prepare_model(args.model)
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    flags = ["--model-path", str(folder), "--sleep-on-idle", *args.flags]  # quiet while the others have their turn
    with contextlib.ExitStack() as servers:
        engines = {}
        for stage in args.stage:
            server = servers.enter_context(ServerProcess(stage, flags))
            engines[f"stage {stage}"] = server_generate(server.url)
        engines["transformers"] = transformers_generate(str(folder))
        engines |= {name: peer_generate(url) for name, url in args.peer}
        measured = measure(engines, vocab_size, args.rounds)
    show(rows(measured), f"{PROMPT_TOKENS} tokens in, {NEW_TOKENS} out, greedy", "throughput", args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
