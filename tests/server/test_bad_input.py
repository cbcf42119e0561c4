"""The table of bad requests against a real server, which serves on with every process it began with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.frontend.test_bad_input import CHAT, COMPLETIONS, GENERATE, V, table
from tests.server.process import Server, title
from tests.server.reference import greedy
from tests.server.trees import widest_flags

PROMPT = "The capital of France is"
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(stage: int) -> Iterator[Server]:
    flags = ("--context-length", "512", "--max-total-tokens", "1000", "--max-running-requests", "32")
    with Server(stage, *flags, *widest_flags(stage)) as server:
        yield server


@pytest.fixture(autouse=True)
def still_serves(server: Server) -> Iterator[None]:
    """Afterwards a good request has its usual answer, from the processes that were there before."""
    before = [(process.pid, title(process)) for process in server.tree()]
    yield
    answer = server.generate(text=PROMPT, sampling_params=GREEDY)
    assert answer["output_ids"] == solo()
    server.assert_whole()
    assert [(process.pid, title(process)) for process in server.tree()] == before
    assert "Traceback" not in server.output, server.output


def solo() -> list[int]:
    return greedy("tiny-random", (PROMPT,), 8)[0]


def vocab_size(server: Server) -> int:
    return int(server.client.get("/get_model_info").json()["vocab_size"])


def with_vocab(raw: str, size: int) -> str:
    """The table's ids beyond its own vocabulary, moved beyond the server's."""
    beyond = "|".join(str(token_id) for token_id in range(V, V + 6))
    return re.sub(rf"(?<![\w.-])({beyond})(?![\w.])", lambda found: str(int(found[0]) - V + size), raw)


NOT_HERE = ("the template refuses it",)
"""Rows that rest on the other table's own chat template."""


def test_the_table_of_bad_values_gives_400s_that_name_the_field(server: Server) -> None:
    size = vocab_size(server)
    rows = [row.values for row in table()]
    rows = [row for row in rows if not any(text in repr(row) for text in NOT_HERE)]
    assert len(rows) > 150

    def send(row: Any) -> tuple[int, str | None, str]:
        path, body, _ = row
        raw = with_vocab(json.dumps(body), size)
        response = server.client.post(path, content=raw, headers={"content-type": "application/json"})
        error = response.json().get("error", {})
        return response.status_code, error.get("param"), error.get("message", "")

    with ThreadPoolExecutor(4) as pool:
        for row, (status, param, message) in zip(rows, pool.map(send, rows), strict=True):
            assert status == 400, (row, message)
            assert param is not None and param.startswith(row[2]), (row, param, message)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"\xff\xfe{}", b"[" * 100_000, b'{"text":' * 50_000, b'{"text": ' + b"1" * 5000 + b"}"],
    ids=["empty", "cut off", "a list", "not UTF-8", "deep list", "deep object", "long number"],
)
def test_a_body_that_is_no_json_object_is_a_400(server: Server, raw: bytes) -> None:
    for path in (COMPLETIONS, CHAT, GENERATE, "/abort_request"):
        response = server.client.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400, path


def test_ids_outside_the_vocabulary_are_refused_and_the_last_one_inside_is_taken(server: Server) -> None:
    """Case C29; the ids of a table that a rank would read out of bounds never reach it."""
    size = vocab_size(server)
    for ids in ([size], [-1], [[1, 2], [size + 5]], [1.5], [True]):
        assert server.post(COMPLETIONS, {"prompt": ids, "max_tokens": 2}).status_code == 400, ids
        assert server.post(GENERATE, {"input_ids": ids}).status_code == 400, ids
    taken = server.generate(input_ids=[size - 1], sampling_params=GREEDY)
    assert taken["meta_info"]["completion_tokens"] == 8
    assert server.post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 2}).json()["usage"]["prompt_tokens"] == 2


def test_unknown_models_are_404s(server: Server) -> None:
    """Case C31."""
    for model in ("no-such", "", "TINY-RANDOM"):
        response = server.post(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 1})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found"), model
    assert server.client.get("/v1/models/no-such").status_code == 404
    for model in ("tiny-random", None):
        response = server.post(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 1})
        assert response.json()["model"] == "tiny-random"


def test_messages_of_any_shape_give_200_or_400(server: Server) -> None:
    """Case C33."""
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    assistant = {"role": "assistant", "content": "hello"}
    for messages in ([assistant], [system, system, user], [user, assistant], [system]):
        response = server.post(CHAT, {"messages": messages, "max_tokens": 2})
        assert response.status_code in (200, 400), messages
    for bad in ([], None, [{"role": "wizard", "content": "hi"}]):
        assert server.post(CHAT, {"messages": bad, "max_tokens": 2}).status_code == 400


def test_every_choice_of_every_prompt_comes_back_in_its_place(server: Server) -> None:
    """Case C39."""
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4, "echo": True, "ignore_eos": True}
    answer = server.post(COMPLETIONS, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["usage"]["completion_tokens"] == 16

    texts, ends = {}, 0
    with server.client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.count("data: [DONE]") == 1 and lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            ends += choice["finish_reason"] is not None
    assert ends == 4
    assert [texts[i][:3] for i in range(4)] == ["one", "one", "two", "two"]
    pairs = server.post(COMPLETIONS, {"prompt": [[5, 6], [7, 8]], "max_tokens": 1}).json()
    assert len(pairs["choices"]) == 2 and pairs["usage"]["prompt_tokens"] == 4


def test_every_position_has_its_own_alternatives(server: Server) -> None:
    """Case C34."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    asked = {**body, "logprobs": True, "top_logprobs": 3}
    answer = server.post(CHAT, asked).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 8
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    assert len({json.dumps(entry["top_logprobs"]) for entry in entries}) > 1
    assert server.post(CHAT, {**asked, "top_logprobs": 21}).status_code == 400
    assert server.post(CHAT, {**body, "top_logprobs": 3}).status_code == 400


def test_extreme_sampling_settings_disturb_nobody(server: Server) -> None:
    """Case C40: beside ordinary requests, every odd one is answered and the greedy ones stay greedy."""
    odd = [{"temperature": value} for value in (0, 1e-12, 1e-6, 1e-4, 2, 100)]
    odd += [{"temperature": 1, "top_p": value} for value in (1e-9, 1e-4)]
    settings = [{**GREEDY, **more} for more in (*odd, *[{}] * 4)]
    answers = server.generate(text=[PROMPT] * len(settings), sampling_params=settings)
    for setting, answer in zip(settings, answers, strict=True):
        assert answer["meta_info"]["completion_tokens"] == 8
        if setting["temperature"] <= 1e-4 or setting.get("top_p", 1) < 0.01:
            assert answer["output_ids"] == solo(), setting
