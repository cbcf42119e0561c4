"""Users who come as they please: Poisson arrivals over HTTP, streamed, every answer checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.live_server import LiveServer
from bench.load import LoadResult, Shot, poisson, run_load
from bench.plan import Case, Figures, Plan, Setup
from bench.sim_reference import SimReference
from bench.suites import setups

NEW_TOKENS = 32
TTFT_LIMIT_MS = 200
TPOT_LIMIT_MS = 25


@dataclass(frozen=True)
class Load:
    """Requests a second, for so many seconds."""

    rate: float
    seconds: float

    def shots(self) -> list[Shot]:
        times = poisson(self.rate, self.seconds, seed=round(self.rate))
        return [Shot(at_s, prompt(i), NEW_TOKENS) for i, at_s in enumerate(times)]


def prompt(i: int) -> str:
    """The i-th user's prompt, unlike any other from its beginning."""
    return f"{i} is my number. " + "Tell me a story about a ship, a storm and a cat that knew the way home. " * 2


def cases(plan: Plan) -> list[Case]:
    loads = [Load(rate, 20) for rate in (2, 8, 16, 32)] if plan.full else [Load(8, 1.5), Load(24, 1.5)]
    found = []
    for load in loads:
        limit = {"rate": load.rate, "ttft_limit_ms": TTFT_LIMIT_MS, "tpot_limit_ms": TPOT_LIMIT_MS}
        for stage in plan.stages:
            setup = Setup(stage, 2, decode_ms=8)
            run = functools.partial(measure, load=load)
            rounds = plan.once_in_quick if load.rate <= 8 else None
            found.append(Case("serving", f"stage{stage}", {**setups.what(setup), **limit}, run, setup, rounds))
        for name, url in plan.peers:
            found.append(Case("serving", name, limit, measure_peer(url, load)))
    return found


def measure(server: LiveServer, load: Load) -> Figures:
    shots = load.shots()
    result = run_load(server.url, shots)
    wrong = sum(hit.text != expected(shot.prompt) for hit, shot in zip(result.hits, shots, strict=True))
    if wrong:
        raise RuntimeError(f"{server.setup.name}: {wrong} of {len(shots)} answers are not what the device must say")
    return figures_of(result)


def measure_peer(url: str, load: Load) -> Callable[[], Figures]:
    """A peer's answers are its own: only their length is checked."""
    return lambda: figures_of(run_load(url, load.shots()))


@functools.lru_cache(maxsize=1)
def _reference() -> SimReference:
    return SimReference()


@functools.cache
def expected(prompt: str) -> str:
    """What the simulated device answers, alone and without a server."""
    return _reference().solo(prompt, NEW_TOKENS).text


def figures_of(result: LoadResult) -> Figures:
    """Latencies in ms of the answers, and what came out a second.  Raises where an answer failed."""
    failed = [hit.error for hit in result.hits if hit.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(result.hits)} requests failed, the first with: {failed[0]}")
    ttft = np.array([hit.first_s for hit in result.hits]) * 1e3
    end_to_end = np.array([hit.last_s for hit in result.hits]) * 1e3
    tpot = (end_to_end - ttft) / [max(1, hit.tokens - 1) for hit in result.hits]
    good = (ttft <= TTFT_LIMIT_MS) & (tpot <= TPOT_LIMIT_MS)
    seconds = max(1e-9, result.seconds)
    figures = {
        "requests": len(result.hits),
        "requests_per_s": len(result.hits) / seconds,
        "tokens_per_s": sum(hit.tokens for hit in result.hits) / seconds,
        "goodput_per_s": float(good.sum()) / seconds,
        "client_cpu_share": result.cpu_share,
        "client_late_ms_max": max(hit.late_s for hit in result.hits) * 1e3,
    }
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", end_to_end)):
        for percent in (50, 90, 99):
            figures[f"{name}_ms_p{percent}"] = float(np.percentile(values, percent))
    return figures
