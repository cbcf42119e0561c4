"""The default model through the official `openai` client: what a user of `make serve` sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.process import Server
from tests.server.reference import PROMPTS, greedy
from tests.server.trees import widest_flags

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def server(stage: int) -> Iterator[Server]:
    flags = ("--max-total-tokens", "4096", *(widest_flags(stage) if stage > 1 else ()))
    with Server(stage, "--model-path", MODEL, *flags) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_capital_of_france_is_paris_streamed_and_not(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content is not None and "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage is not None and choice.logprobs is not None and choice.logprobs.content is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)

    text, usages, finishes = "", [], []
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for delta in chunk.choices:
            text += delta.delta.content or ""
            finishes.append(delta.finish_reason)
    assert text == choice.message.content
    assert [usage.completion_tokens for usage in usages] == [answer.usage.completion_tokens]
    assert [finish for finish in finishes if finish] == ["stop"]


def test_models_are_listed_and_unknown_ones_raise(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such", prompt="a", max_tokens=1)


def test_greedy_tokens_of_the_default_model_are_those_of_transformers(server: Server, stage: int) -> None:
    prompts = PROMPTS if stage == 1 else PROMPTS[:3]
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answers = server.generate(text=prompts, sampling_params=params)
    expected = greedy(MODEL, tuple(PROMPTS), NEW_TOKENS)[: len(prompts)]
    assert [answer["output_ids"] for answer in answers] == expected


@pytest.mark.stages(1)
def test_three_ranks_share_the_three_kv_heads_of_the_default_model() -> None:
    with Server(1, "--model-path", MODEL, "--tp-size", "3", "--max-total-tokens", "2048") as server:
        params = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answers = server.generate(text=PROMPTS[:3], sampling_params=params)
        expected = greedy(MODEL, tuple(PROMPTS), NEW_TOKENS)[:3]
        assert [answer["output_ids"] for answer in answers] == expected
