"""What the formats of weights cost and give: speed, memory, and how far greedy answers stay those of float32.

    python -m bench.weight_formats [--rounds 2] [--markdown FILE]

Speed is that of `bench.throughput`'s work, the formats in turn.  Memory is the proportional share (PSS) of the process
that holds the model, after that work.  Agreement is over ten prompts of plain English, 64 tokens each, one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from pathlib import Path

import httpx
import psutil

from bench.server_process import ServerProcess, end_on_sigterm
from bench.tables import show
from bench.throughput import BATCH_SIZES, measure, server_generate, spread
from shared.weights.model_config import ModelConfig
from shared.weights.prepare import DEFAULT_MODEL, prepare_model

FORMATS = {
    "float32": [],
    "bfloat16": ["--dtype", "bfloat16"],
    "float16 weights": ["--quantization", "float16"],
    "int8 weights": ["--quantization", "int8"],
}
NEW_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "To make a cup of tea, first",
    "The sun rises in the east because",
    "My favourite season of the year is",
    "In the year 1969, humans first",
    "A good way to learn a language is",
    "The difference between a cat and a dog is",
)


def greedy_ids(url: str) -> list[list[int]]:
    """The answers to `PROMPTS`."""
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=600) as client:
        answers = [client.post("/generate", json={"text": text, "sampling_params": params}) for text in PROMPTS]
    return [answer.raise_for_status().json()["output_ids"] for answer in answers]


def tokens_in_common(answer: list[int], expected: list[int]) -> int:
    """How many tokens the two begin with alike."""
    alike = [a == b for a, b in zip(answer, expected, strict=True)]
    return alike.index(False) if False in alike else len(alike)


def model_mb(server: ServerProcess) -> float:
    """Of the server's process with the most memory."""
    main = psutil.Process(server.pid)
    return max(float(process.memory_full_info().pss) for process in main.children(recursive=True)) / 1e6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.weight_formats", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="counted rounds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to its place in FILE")
    args = parser.parse_args(argv)
    end_on_sigterm()
    folder = prepare_model(DEFAULT_MODEL)
    common = ["--model-path", str(folder), "--sleep-on-idle", "--max-total-tokens", "8192"]
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(ServerProcess(1, common + flags)) for name, flags in FORMATS.items()}
        answers = {name: greedy_ids(server.url) for name, server in servers.items()}
        engines = {name: server_generate(server.url) for name, server in servers.items()}
        measured = measure(engines, ModelConfig.from_folder(folder).vocab_size, args.rounds)
        memory = {name: model_mb(server) for name, server in servers.items()}
    rows = [
        ["weights", *[f"tokens/s at {size}" for size in BATCH_SIZES], "MB", "tokens before they differ", "the same"]
    ]
    for name in FORMATS:
        pairs = zip(answers[name], answers["float32"], strict=True)
        alike = [tokens_in_common(answer, expected) for answer, expected in pairs]
        rates = [spread(measured[size, name].rates, ".1f") for size in BATCH_SIZES]
        whole = sum(count == NEW_TOKENS for count in alike)
        agreement = [f"{statistics.mean(alike):.1f} of {NEW_TOKENS}", f"{whole} of {len(PROMPTS)}"]
        rows.append([name, *rates, f"{memory[name]:.0f}", *agreement])
    show(rows, "formats of weights", "weight formats", args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
