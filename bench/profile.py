"""Where the time of one forward goes, by kind of operation.

    python -m bench.profile [--requests 32] [--context 160] [-o NEW.json] [--against OLD.json]
                            [--markdown FILE] [-- SERVER FLAGS]

One rank without any server: a decode of so many requests at that context, and a prefill of as many prompt tokens as
one chunk holds.  A kind is the time in the methods of the kernel backend that do it, on the CPU, which computes while
it is called.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_check.cases import make_batch
from bench.tables import show
from shared.executor.forward_batch import ForwardBatch, ForwardMode
from shared.executor.model_runner import ModelRunner
from shared.executor.rank import runner_class
from shared.parallel.tp_group import TpGroup
from shared.server_args import parse_server_args
from shared.weights.model_config import ModelConfig
from shared.weights.prepare import prepare_model

KINDS = {
    "linear": "matrix products",
    "plan_attention": "attention",
    "attention": "attention",
    "store_kv": "storing KV",
    "rms_norm": "norms, RoPE, activation",
    "add_rms_norm": "norms, RoPE, activation",
    "rope": "norms, RoPE, activation",
    "silu_and_mul": "norms, RoPE, activation",
}
"""The kinds of work, by the methods of a kernel backend that do it."""
REST = "embedding, sampling and the rest"
PROMPT_TOKENS = 128

Profile = dict[str, dict[str, float]]
"""Milliseconds of one forward by what was run and kind; the kind `whole` is the median without the profiler."""


class Stopwatch:
    """Adds up the time in each kind of work, without what one method spends in another of them."""

    def __init__(self, kernels: Any) -> None:
        self.ms = dict.fromkeys(KINDS.values(), 0.0)
        self._inner = 0.0
        for method, kind in KINDS.items():
            setattr(kernels, method, self._timed(getattr(kernels, method), kind))

    def _timed(self, work: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return work(*args)
            finally:
                spent = (time.perf_counter() - start) * 1e3
                self.ms[kind] += spent - self._inner
                self._inner = outer + spent

        return timed


def profile(runner: ModelRunner, stopwatch: Stopwatch, batch: ForwardBatch, repeats: int) -> dict[str, float]:
    """Milliseconds of one forward of `batch`, by kind: means, and the median of the whole."""
    for _ in range(3):
        runner.launch(batch).wait()
    stopwatch.ms = dict.fromkeys(stopwatch.ms, 0.0)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        runner.launch(batch).wait()
        times.append((time.perf_counter() - start) * 1e3)
    by_kind = {kind: ms / repeats for kind, ms in stopwatch.ms.items()}
    return {"whole": statistics.median(times), **by_kind, REST: statistics.mean(times) - sum(by_kind.values())}


def measure(flags: list[str], requests: list[int], context: int, repeats: int) -> Profile:
    args = parse_server_args("bench.profile", frozenset(), ["--max-total-tokens", "65536", *flags])
    folder = prepare_model(args.model_path)
    config = ModelConfig.from_folder(folder)
    chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else 2048
    batches = {
        f"decode of {count} at {context}": make_batch(
            [(context - 1, 1)] * count, count * context, 0, ForwardMode.DECODE, config.vocab_size
        )
        for count in requests
    }
    prompts = [(0, PROMPT_TOKENS)] * max(1, chunk // PROMPT_TOKENS)
    batches[f"prefill of {len(prompts)} x {PROMPT_TOKENS}"] = make_batch(
        prompts, len(prompts) * PROMPT_TOKENS, 0, ForwardMode.EXTEND, config.vocab_size
    )
    runner = runner_class(args.device)(
        dataclasses.replace(args, model_path=str(folder)),
        config,
        TpGroup(0, 1),
        context_length=max(context, PROMPT_TOKENS) + 8,
        max_running_requests=max(*requests, len(prompts)),
    )
    most = max(requests)
    fill = [(0, context)] * most  # a slot that was never written is a page of zeros that all slots share
    runner.launch(make_batch(fill, most * context, 0, ForwardMode.EXTEND, config.vocab_size)).wait()
    stopwatch = Stopwatch(runner.kernels)
    return {name: profile(runner, stopwatch, batch, repeats) for name, batch in batches.items()}


def rows(found: Profile, before: Profile) -> list[list[str]]:
    """A column for each forward; with an earlier profile `then → now`."""
    names = list(found)
    lines = [["milliseconds of a forward", *names]]
    for kind in found[names[0]]:
        lines.append([kind, *[_cell(found[name][kind], before.get(name, {}).get(kind)) for name in names]])
    return lines


def _cell(ms: float, before: float | None) -> str:
    return f"{ms:.2f}" if before is None else f"{before:.2f} → {ms:.2f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=160, help="tokens of each request in a decode")
    parser.add_argument("--repeats", type=int, default=20, help="forwards timed")
    parser.add_argument("-o", "--output", type=Path, help="keep the figures in this file")
    parser.add_argument("--against", type=Path, help="show the figures of an earlier run before these")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to its place in FILE")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args(argv)
    before: Any = json.loads(args.against.read_text(encoding="utf-8")) if args.against else {}
    found = measure(args.flags, args.requests, args.context, args.repeats)
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(rows(found, before), "one rank, no server", "profile", args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
