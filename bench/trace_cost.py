"""What `--trace-dir` adds to a decode step on a device that takes no time.

    python -m bench.trace_cost [--rounds 15] [--markdown FILE]

An engine as stages 1-3 step it, in this process, that records or does not, in turn.  CPU time of one thread, with the
writing of what was recorded, which a server leaves to another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.scheduler_cost import PROMPT_TOKENS, VOCAB, make_config, request
from bench.tables import show
from bench.throughput import spread
from shared import trace
from shared.executor.engine_step import ERA_DECODE_STEPS, EngineStep
from shared.executor.rank import Rank
from shared.executor.sim_runner import SimRunner
from shared.parallel.tp_group import TpGroup
from shared.server_args import parse_server_args

CALLS = 100
"""Of `step` that are counted, each of `ERA_DECODE_STEPS` decodes."""
FLAGS = ["--device", "sim", "--model-path", "tiny-random", "--sim-decode-ms", "0", "--sim-prefill-us-per-token", "0"]


def us_per_decode(running: int, folder: Path | None) -> float:
    """Microseconds of CPU time of one decode of `running` requests, recorded into `folder` if there is one."""
    config = make_config(running)
    flags = [*FLAGS, "--max-total-tokens", str(config.max_total_num_tokens)]
    runner = SimRunner(parse_server_args("bench.trace_cost", frozenset(), flags), VOCAB, config.context_length)
    trace.start(None if folder is None else str(folder), "bench.trace_cost")
    try:
        rank = Rank(runner, TpGroup(0, 1), config, checker=None)
        engine = EngineStep(rank, decode_steps=ERA_DECODE_STEPS, cut_on_stream=False)
        track = trace.track()
        rng = np.random.default_rng(0)
        engine.step([request(row, rng, prompt=PROMPT_TOKENS) for row in range(running)])
        launches = runner.launches
        start = time.thread_time_ns()
        for _ in range(CALLS):
            engine.step([])
            track.end_step(busy=True)
        trace.flush()
        spent_ns = time.thread_time_ns() - start
        assert runner.launches - launches == CALLS * ERA_DECODE_STEPS
        return spent_ns / 1e3 / CALLS / ERA_DECODE_STEPS
    finally:
        trace.stop()


def measure(running: int, rounds: int, base: Path) -> tuple[list[float], list[float]]:
    """Without and with a trace, after a round that does not count."""
    without, traced = [], []
    for round in range(rounds + 1):
        folder = base / f"{running}-{round}"
        folder.mkdir()
        found = {where: us_per_decode(running, where) for where in ((None, folder) if round % 2 else (folder, None))}
        if round:
            without.append(found[None])
            traced.append(found[folder])
    return without, traced


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.trace_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to its place in FILE")
    args = parser.parse_args(argv)
    rows = [["running", "µs of a decode", "with a trace", "more", "share"]]
    with tempfile.TemporaryDirectory(prefix="trace-cost-") as base:
        for running in (1, 32):
            without, traced = measure(running, args.rounds, Path(base))
            more = [b - a for a, b in zip(without, traced, strict=True)]
            share = f"{statistics.median(more) / statistics.median(without):.1%}"
            rows.append([str(running), *(spread(values, ".1f") for values in (without, traced, more)), share])
    show(rows, "a trace's cost, CPU time, device of 0 ms", "trace cost", args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
