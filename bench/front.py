"""What the way out costs: streaming on 64 connections, and the detokenizer alone.

    python -m bench.front [--stage 1 4] [--rounds 5] [--markdown FILE]

Streams: 64 requests at once on the default model, all of them streamed or none, in turn.  The client reads and does not
parse, and has its share of the same cores.  Detokenizer: its process, between two sockets, batches of one token each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import zmq

from bench.server_process import ServerProcess, end_on_sigterm
from bench.tables import show
from bench.throughput import Prompts, fresh_prompts, spread
from shared.detokenizer import run_detokenizer_process
from shared.launch import Supervisor
from shared.launch.run_dir import RunDir
from shared.messages import BatchTokenIDOut, FinishReason, PortArgs, SamplingParams
from shared.server_args import parse_server_args
from shared.weights.model_config import ModelConfig
from shared.weights.prepare import DEFAULT_MODEL, prepare_model

CONNECTIONS = 64
NEW_TOKENS = 32
BATCHES = 400


def tokens_per_second(url: str, prompts: Prompts, *, streamed: bool) -> float:
    """Output tokens per second for all `prompts` at once.  Raises RuntimeError for an answer that is not whole."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> bytes:
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "stream": streamed}
        last = b""
        async with client.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for chunk in response.aiter_raw():
                last = last[-4096:] + chunk
        return last

    async def together() -> list[bytes]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    start = time.perf_counter()
    ends = asyncio.run(together())
    seconds = time.perf_counter() - start
    if not all(map(is_whole, ends)):
        raise RuntimeError("an answer is not whole")
    return NEW_TOKENS * len(prompts) / seconds


def is_whole(end: bytes) -> bool:
    """Whether the end of an answer says that all tokens were made."""
    return f'"completion_tokens":{NEW_TOKENS}'.encode() in end.replace(b" ", b"")


def streaming(url: str, vocab_size: int, rounds: int) -> dict[bool, list[float]]:
    """Rates with and without streaming, after a round that does not count."""
    rng = np.random.default_rng(0)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for round in range(rounds + 1):
        for streamed in (False, True) if round % 2 else (True, False):
            rate = tokens_per_second(url, fresh_prompts(CONNECTIONS, vocab_size, rng), streamed=streamed)
            if round:
                rates[streamed].append(rate)
    return rates


@contextlib.contextmanager
def detokenizer(folder: Path) -> Iterator[PortArgs]:
    """A detokenizer process that is ready."""
    run_dir = RunDir()
    supervisor = Supervisor(at_exit=run_dir.remove)
    args = parse_server_args("bench.front", frozenset(), ["--model-path", str(folder)])
    try:
        port_args = run_dir.port_args()
        supervisor.start("detokenizer", "bench: detokenizer", run_detokenizer_process, (args, port_args))
        supervisor.wait_ready()
        yield port_args
    finally:
        supervisor.stop()
        run_dir.remove()


def batch(rows: int, rids: str, ids: list[int], *, ends: bool) -> BatchTokenIDOut:
    """One new token for each of `rows` requests."""
    reason = FinishReason("length") if ends else None
    return BatchTokenIDOut(
        rids=[f"{rids}-{row}" for row in range(rows)],
        new_ids=[[ids[row]] for row in range(rows)],
        finish_reasons=[reason] * rows,
        prompt_tokens=[1] * rows,
        completion_tokens=[1] * rows,
        cached_tokens=[0] * rows,
        sampling_params=[SamplingParams()] * rows,
        logprobs=[None] * rows,
    )


def detokenized_per_second(port_args: PortArgs, rows: int, vocab_size: int, rounds: int) -> list[float]:
    """Tokens per second through the detokenizer for streams of `rows` requests, sent as fast as it takes them."""
    rng = np.random.default_rng(0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    to, back = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    rates = []
    try:
        for socket in (to, back):
            socket.set_hwm(0)
        back.bind(port_args.tokenizer_ipc_name)
        to.connect(port_args.detokenizer_ipc_name)
        for round in range(rounds + 1):
            ids = rng.integers(100, vocab_size, (BATCHES, rows)).tolist()
            sent = [batch(rows, str(round), row, ends=at == BATCHES - 1) for at, row in enumerate(ids)]
            start = time.perf_counter()
            for one in sent:
                to.send_pyobj(one)
            tokens = sum(len(back.recv_pyobj().texts) for _ in sent)
            if round:
                rates.append(tokens / (time.perf_counter() - start))
    finally:
        context.destroy(linger=0)
    return rates


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.front", description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, nargs="+", choices=(1, 2, 3, 4), default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to its place in FILE")
    args = parser.parse_args(argv)
    end_on_sigterm()
    folder = prepare_model(DEFAULT_MODEL)
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    rows = [["what", "none streamed", "all streamed", "share lost"]]
    for stage in args.stage:
        flags = ["--model-path", str(folder), "--max-running-requests", str(CONNECTIONS)]
        with ServerProcess(stage, flags) as server:
            rates = streaming(server.url, vocab_size, args.rounds)
        lost = [1 - streamed / plain for plain, streamed in zip(rates[False], rates[True], strict=True)]
        what = f"stage {stage}, {CONNECTIONS} requests, tokens/s"
        rows.append([what, spread(rates[False], ".1f"), spread(rates[True], ".1f"), spread(lost, ".1%")])
    with detokenizer(folder) as port_args:
        for count in (1, CONNECTIONS):
            rates_alone = detokenized_per_second(port_args, count, vocab_size, args.rounds)
            what = f"detokenizer alone, {count} a batch, tokens/s"
            rows.append([what, "", spread(rates_alone, ".0f"), ""])
    show(rows, "the way out", "front", args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
