"""An open-loop client: sends every request at its time, whatever has become of those before it.

    python -m bench.load < load.json > answers.json

A process of its own, so that neither its work nor its garbage is in anybody's way.  `run_load` starts it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np

from bench.server_process import ROOT


@dataclass(frozen=True)
class Shot:
    """One request: `at_s` after the start, streamed from `/v1/completions`."""

    at_s: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Hit:
    """What became of a `Shot`; seconds since it was due, so that a client that is late counts against the answer.

    `late_s` is how late it was sent.  `error` is None for a whole answer.
    """

    late_s: float
    first_s: float
    last_s: float
    tokens: int
    text: str
    error: str | None


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrivals at `rate` a second on average, in `[0, seconds)`."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, round(2 * rate * seconds) + 20)
    times = np.cumsum(gaps)
    return [float(at) for at in times[times < seconds]]


@dataclass(frozen=True)
class LoadResult:
    """`cpu_share` is what the client itself took of a core."""

    hits: list[Hit]
    seconds: float
    cpu_share: float


def run_load(url: str, shots: Sequence[Shot]) -> LoadResult:
    """Sends `shots` from a process of its own.  Raises `RuntimeError` where that process fails."""
    order = json.dumps({"url": url, "shots": [asdict(shot) for shot in shots]})
    client = subprocess.run(
        [sys.executable, "-m", "bench.load"], cwd=ROOT, input=order, stdout=subprocess.PIPE, text=True, check=False
    )
    if client.returncode:
        raise RuntimeError(f"the load generator ended with status {client.returncode}")
    answer = json.loads(client.stdout)
    return LoadResult([Hit(**hit) for hit in answer["hits"]], answer["seconds"], answer["cpu_share"])


async def _fire(client: httpx.AsyncClient, model: str, shot: Shot, start: float) -> Hit:
    due = start + shot.at_s
    await asyncio.sleep(due - time.perf_counter())
    late_s = time.perf_counter() - due
    body = {
        "model": model,
        "prompt": shot.prompt,
        "max_tokens": shot.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, tokens, first_s, last_s = "", 0, 0.0, 0.0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                detail = (await response.aread()).decode(errors="replace")[:200]
                return Hit(late_s, 0, 0, 0, "", f"{response.status_code}: {detail}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    return Hit(late_s, first_s, last_s, tokens, text, str(event["error"]))
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                if event["choices"]:
                    last_s = time.perf_counter() - due
                    first_s = first_s or last_s
                    text += event["choices"][0]["text"]
    except httpx.HTTPError as error:
        return Hit(late_s, first_s, last_s, tokens, text, repr(error))
    problem = None if tokens == shot.max_tokens else f"{tokens} tokens instead of {shot.max_tokens}"
    return Hit(late_s, first_s, last_s, tokens, text, problem)


async def _main(order: dict[str, Any]) -> dict[str, Any]:
    shots = [Shot(**shot) for shot in order["shots"]]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=order["url"], timeout=120, limits=limits) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        cpu, start = time.process_time(), time.perf_counter() + 0.05
        hits = await asyncio.gather(*(_fire(client, model, shot, start) for shot in shots))
        seconds = time.perf_counter() - start
    return {
        "hits": [asdict(hit) for hit in hits],
        "seconds": seconds,
        "cpu_share": (time.process_time() - cpu) / seconds,
    }


if __name__ == "__main__":
    json.dump(asyncio.run(_main(json.load(sys.stdin))), sys.stdout)
