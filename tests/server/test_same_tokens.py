"""The same tokens from every stage, at every size, batched or alone, cached or not, chunked or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import existing_stages
from tests.server.process import Server
from tests.server.reference import NEW_TOKENS, PROMPTS, greedy, sampled

MODEL = "tiny-random"
SMALL_POOL = 420
"""Token slots that hold the longest prompt with its answer, but not all ten: some must be retracted."""


@dataclass(frozen=True)
class Config:
    stage: int
    tp: int = 1
    dp: int = 1
    cache: bool = True
    chunked: bool = False
    overlap: bool = True
    small_pool: bool = False

    def flags(self) -> list[str]:
        flags = ["--tp-size", str(self.tp), "--check-determinism", "--sleep-on-idle"]
        flags += ["--max-total-tokens", str(SMALL_POOL if self.small_pool else 8192)]
        flags += ["--chunked-prefill-size", "16" if self.chunked else "-1"]
        if self.dp > 1:
            flags += ["--dp-size", str(self.dp)]
        if not self.cache:
            flags.append("--disable-radix-cache")
        if not self.overlap:
            flags.append("--disable-overlap-schedule")
        if self.small_pool:
            flags += ["--schedule-conservativeness", "0.0"]
        return flags

    def __str__(self) -> str:
        words = [f"stage{self.stage}", f"tp{self.tp}", f"dp{self.dp}"]
        words += ["cache" if self.cache else "no_cache", "chunked" if self.chunked else "whole"]
        words += [] if self.overlap else ["in_turn"]
        return "-".join(words + (["small_pool"] if self.small_pool else []))


def configs() -> Iterator[Config]:
    for stage in existing_stages():
        dps = (1,) if stage == 1 else (1, 2)
        overlaps = (True, False) if stage == 4 else (True,)
        for tp, dp, cache, chunked, overlap in itertools.product((1, 2), dps, (True, False), (False, True), overlaps):
            yield Config(stage, tp, dp, cache, chunked, overlap)
        yield Config(stage, tp=3)
        for overlap in overlaps:
            yield Config(stage, tp=2, overlap=overlap, small_pool=True)


@pytest.fixture(
    scope="module", params=[pytest.param(c, id=str(c), marks=pytest.mark.stages(c.stage)) for c in configs()]
)
def config(request: pytest.FixtureRequest) -> Config:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(config: Config) -> Iterator[Server]:
    with Server(config.stage, *config.flags()) as server:
        yield server


@pytest.fixture(autouse=True)
def pool_is_whole_afterwards(server: Server) -> Iterator[None]:
    yield
    server.assert_whole()


def params(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **more}


def test_greedy_tokens_are_those_of_transformers_alone_and_batched(server: Server, config: Config) -> None:
    expected = greedy(MODEL)
    batched = server.generate(text=PROMPTS, sampling_params=params())
    assert [answer["output_ids"] for answer in batched] == expected
    alone = [server.generate(text=prompt, sampling_params=params()) for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in alone] == expected
    if not config.small_pool:
        assert any(answer["meta_info"]["cached_tokens"] for answer in alone) == config.cache
    else:
        assert sum(state["retractions"] for state in server.info()["internal_states"]) > 0


def test_seeded_sampling_is_the_same_everywhere(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    expected = sampled(MODEL, **settings, run_dir=str(tmp_path_factory.getbasetemp()))
    seeded = [params(**settings, seed=i) for i in range(len(PROMPTS))]
    batched = server.generate(text=PROMPTS, sampling_params=seeded)
    assert [answer["output_ids"] for answer in batched] == expected
    assert expected != greedy(MODEL)


def test_streamed_text_is_the_text_not_streamed(server: Server) -> None:
    def streamed(prompt: str) -> str:
        request = {"text": prompt, "sampling_params": params(), "stream": True}
        text = ""
        with server.client.stream("POST", "/generate", json=request) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    text = json.loads(line[len("data: ") :])["text"]
        return text

    whole = [answer["text"] for answer in server.generate(text=PROMPTS, sampling_params=params())]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(streamed, PROMPTS)) == whole
