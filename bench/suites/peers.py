"""Tokens a second of the default model, beside other engines on the same work.

Greedy, EOS ignored, 128 prompt tokens, 64 new ones, prompts that no cache has seen, prompt time included.  This is
minutes of work, so it is not in a quick run unless it is asked for.
"""

from __future__ import annotations

import functools

import numpy as np

from bench.live_server import LiveServer
from bench.plan import Case, Figures, Plan, Setup
from bench.throughput import (
    BATCH_SIZES,
    Generate,
    fresh_prompts,
    peer_generate,
    server_generate,
    timed,
    transformers_generate,
)
from shared.weights.model_config import ModelConfig
from shared.weights.prepare import DEFAULT_MODEL, prepare_model


def cases(plan: Plan) -> list[Case]:
    if not plan.full and "peers" not in plan.suites:
        return []
    found = []
    for size in BATCH_SIZES:
        what = {"requests": size}
        for stage in plan.stages:
            setup = Setup(stage, device="cpu", variant="throughput", flags=("--sleep-on-idle",))
            found.append(Case("peers", f"stage{stage}", what, functools.partial(measure_stage, size=size), setup))
        found.append(Case("peers", "transformers", what, functools.partial(measure_transformers, size)))
        for name, url in plan.peers:
            found.append(Case("peers", name, what, functools.partial(measure_peer, url, size)))
    return found


def measure_stage(server: LiveServer, size: int) -> Figures:
    return _rate(server_generate(server.url), size)


def measure_transformers(size: int) -> Figures:
    return _rate(_transformers(), size)


def measure_peer(url: str, size: int) -> Figures:
    return _rate(peer_generate(url), size)


@functools.lru_cache(maxsize=1)
def _transformers() -> Generate:
    return transformers_generate(str(prepare_model(DEFAULT_MODEL)))


def _rate(generate: Generate, size: int) -> Figures:
    """The second time counts."""
    vocab_size = ModelConfig.from_folder(prepare_model(DEFAULT_MODEL)).vocab_size
    rng = np.random.default_rng()
    timed(generate, fresh_prompts(1, vocab_size, rng))
    rate, _ = timed(generate, fresh_prompts(size, vocab_size, rng))
    return {"tokens_per_s": rate}
