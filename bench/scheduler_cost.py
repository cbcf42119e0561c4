"""CPU time of the scheduler alone: one decode step, and looking up a cached prompt.

    python -m bench.scheduler_cost [--markdown FILE]

No model and no process: the scheduler's own calls around a forward that is given its result.  CPU time of the
thread, median over steps, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NoReturn

import numpy as np

from bench.tables import show
from shared.executor.forward_batch import ForwardResult
from shared.messages import SamplingParams, TokenizedGenerateReqInput
from shared.scheduling.batch import ScheduleBatch
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.core import SchedulerCore

VOCAB = 32_000
PROMPT_TOKENS = 128
STEPS = 300
LOOKUP_TOKENS = 4096


def make_config(running: int) -> SchedulerConfig:
    """Room for `running` requests that go on for a long time."""
    return SchedulerConfig(
        max_total_num_tokens=running * 2048 + 20_000,
        max_running_requests=running,
        context_length=8192,
        vocab_size=VOCAB,
        eos_token_ids=(2,),
        make_stop_finder=_no_stop_strings,
    )


def _no_stop_strings(params: SamplingParams) -> NoReturn:
    raise ValueError("the requests of this benchmark have no stop strings")


def request(rid: int, rng: np.random.Generator, *, prompt: int, common: int = 0) -> TokenizedGenerateReqInput:
    """A streaming request of random ids, the first `common` of which all requests have."""
    ids = rng.integers(10, VOCAB, prompt)
    ids[:common] = np.arange(10, 10 + common)
    params = SamplingParams(temperature=0.0, max_new_tokens=1500, ignore_eos=True)
    return TokenizedGenerateReqInput(str(rid), ids, params, stream=True)


def finish(core: SchedulerCore, batch: ScheduleBatch | None) -> None:
    """Gives `batch` a result: token 5 for every row."""
    assert batch is not None
    core.process_batch_result(batch, ForwardResult(np.full(len(batch.reqs), 5, dtype=np.int64)))
    core.take_outputs()


def decode_step_us(running: int, waiting: int, *, prompt: int = PROMPT_TOKENS, common: int = 0) -> list[float]:
    """Microseconds of each of `STEPS` decode steps: input, next batch, result and outputs."""
    core = SchedulerCore(make_config(running))
    rng = np.random.default_rng(0)
    reqs = [request(i, rng, prompt=prompt, common=common) for i in range(running + waiting)]
    core.process_input_requests(list(reqs[:running]))
    while len(core.batcher.running) < running:
        finish(core, core.get_next_batch_to_run())
    core.process_input_requests(list(reqs[running:]))
    costs = []
    for _ in range(STEPS):
        start = time.thread_time_ns()
        core.process_input_requests([])
        finish(core, core.get_next_batch_to_run())
        costs.append((time.thread_time_ns() - start) / 1e3)
    assert len(core.batcher.running) == running and len(core.batcher.waiting) == waiting
    return costs


def cached_lookup_us() -> list[float]:
    """Microseconds to match and lock, then unlock, a wholly cached prompt of `LOOKUP_TOKENS` tokens."""
    core = SchedulerCore(make_config(8))
    rng = np.random.default_rng(0)
    recv = request(0, rng, prompt=LOOKUP_TOKENS)
    core.process_input_requests([recv])
    finish(core, core.get_next_batch_to_run())
    tree = core.memory.tree
    assert tree is not None
    costs = []
    for _ in range(STEPS):
        start = time.thread_time_ns()
        match = tree.match_prefix(recv.input_ids)
        tree.lock(match.node)
        costs.append((time.thread_time_ns() - start) / 1e3)
        tree.unlock(match.node)
        assert len(match.slots) == LOOKUP_TOKENS
    return costs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to its place in FILE")
    args = parser.parse_args(argv)
    rows = [["what", "CPU µs, median (10 %-90 %)"]]
    for running in (1, 32, 256):
        for waiting in (0, 512, 5000):
            costs = decode_step_us(running, waiting)
            rows.append([f"decode step, {running} running, {waiting} waiting", _spread(costs)])
    for waiting in (50, 5000):
        costs = decode_step_us(8, waiting, prompt=500, common=400)
        what = f"decode step, 8 running, {waiting} waiting that share 400 of 500 tokens"
        rows.append([what, _spread(costs)])
    rows.append([f"look-up of {LOOKUP_TOKENS} cached tokens", _spread(cached_lookup_us())])
    show(rows, "scheduler alone", "scheduler cost", args.markdown)
    return 0


def _spread(values: list[float]) -> str:
    deciles = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.1f} ({deciles[0]:.1f}-{deciles[-1]:.1f})"


if __name__ == "__main__":
    sys.exit(main())
