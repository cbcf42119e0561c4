"""Bad requests are 400s that name the field, and the server still serves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend.conftest import Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
USER = [{"role": "user", "content": "hi"}]
V = 300
NAN = float("nan")
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]

COMPLETION_CASES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["ok", ""]}, "prompt[1]"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": DEEP}, "prompt[0][0]"),
    ({"prompt": [V]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": [[1, 2], [V + 5]]}, "prompt[1][0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt[0]"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "a" * 600}, "prompt"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "echo": "yes"}, "echo"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
]
CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": DEEP}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [*USER, {"role": "wizard", "content": "hi"}]}, "messages[1].role"),
    ({"messages": [{"role": DEEP, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "the template refuses it"}]}, "messages"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": 3}, "logprobs"),
    ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
]
SAMPLING_CASES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": True}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "\ud83d"}, "stop[0]"),
    ({"stop_token_ids": [None]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [V + 1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"logit_bias": {str(V): 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"\ud800": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias.5"),
    ({"logit_bias": {"5": NAN}}, "logit_bias.5"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"\ud800": 1}, "\\ud800"),
]
OPENAI_CASES: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"model": 5}, "model"),
]
NATIVE_CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": "a", "input_ids": [5]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", 5]}, "text[1]"),
    ({"text": 5}, "text"),
    ({"text": "\ud800"}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": "abc"}, "input_ids"),
    ({"input_ids": [V]}, "input_ids[0]"),
    ({"input_ids": [[5], [True]]}, "input_ids[1][0]"),
    ({"input_ids": [5, [6]]}, "input_ids[1]"),
    ({"text": "a", "rid": 5}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": "a", "rid": "\ud800"}, "rid"),
    ({"text": "a", "rid": ["x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ({"text": ["a", "b"], "rid": "x"}, "rid"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"),
    ({"text": "a", "sampling_params": [5]}, "sampling_params[0]"),
    ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ({"text": "a", "image_data": "x"}, "image_data"),
    ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
    ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
    ({"text": "a", "stream": 1}, "stream"),
]


def table() -> list[Any]:
    rows = [(COMPLETIONS, body, param) for body, param in COMPLETION_CASES]
    rows += [(CHAT, body, param) for body, param in CHAT_CASES]
    rows += [(GENERATE, body, param) for body, param in NATIVE_CASES]
    for more, param in SAMPLING_CASES:
        rows.append((COMPLETIONS, {"prompt": "a", **more}, param))
        rows.append((CHAT, {"messages": USER, **more}, param))
        rows.append((GENERATE, {"text": "a", "sampling_params": more}, f"sampling_params.{param}"))
    for more, param in OPENAI_CASES:
        rows.append((COMPLETIONS, {"prompt": "a", **more}, param))
        rows.append((CHAT, {"messages": USER, **more}, param))
    return [pytest.param(*row, id=f"{place}:{row[0]}:{row[2]!a}") for place, row in enumerate(rows)]


@pytest.mark.parametrize(("path", "body", "param"), table())
def test_a_bad_value_is_a_400_that_names_the_field(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    raw = json.dumps(body)
    response = server.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert param.removeprefix("sampling_params.") in error["message"]


@pytest.mark.parametrize(
    ("raw", "content_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b'"x"', "application/json"),
        (b"\xff\xfe{}", "application/json"),
        (b'{"prompt": "\xe9"}', "application/json"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt":' * 50_000, "application/json"),
        (b'{"prompt": "a"}', "text/plain"),
        (b"prompt=a", "application/x-www-form-urlencoded"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/abort_request"])
def test_a_body_that_is_no_json_object_is_a_400(server: Server, path: str, raw: bytes, content_type: str) -> None:
    response = server.client.post(path, content=raw, headers={"content-type": content_type})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_body_above_the_limit_is_a_413(server: Server) -> None:
    big = b'{"prompt": "' + b"a" * (33 * 2**20) + b'"}'
    assert server.client.post(COMPLETIONS, content=big).status_code == 413

    def chunks() -> Any:
        for start in range(0, len(big), 2**20):
            yield big[start : start + 2**20]

    assert server.client.post(COMPLETIONS, content=chunks()).status_code == 413


def test_a_prompt_that_does_not_fit_names_both_numbers(server: Server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a" * 600}), (GENERATE, {"input_ids": [9] * 600})):
        message = server.post(path, body).json()["error"]["message"]
        assert "600" in message and "512" in message


def test_it_still_serves(server: Server) -> None:
    """Comes after the tables above, on the same server."""
    response = server.post(COMPLETIONS, {"prompt": [V - 1], "max_tokens": 3})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 3
    assert server.manager.live_requests == 0


@pytest.mark.parametrize(
    "more",
    [
        {"user": "x", "metadata": {"a": [NAN]}, "store": True},
        {"n": None, "stop": None, "stream": None, "stream_options": None, "seed": None, "logit_bias": None},
        {"stop": [], "logit_bias": {}, "stop_token_ids": [], "temperature": 0, "top_k": -1, "top_p": 1},
        {"temperature": 1e-12, "top_p": 1e-9, "min_p": 0.0, "repetition_penalty": 1, "service_tier": "auto"},
        {"seed": -1, "max_tokens": 10**30, "stop": ["a"] * 16, "logit_bias": {"5": 100, "6": -100.0}},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(server: Server, more: dict[str, Any]) -> None:
    body = {"max_tokens": 2, **more}
    assert server.client.post(COMPLETIONS, content=json.dumps({"prompt": "a", **body})).status_code == 200
    assert server.client.post(CHAT, content=json.dumps({"messages": USER, **body})).status_code == 200
