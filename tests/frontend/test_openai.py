"""The OpenAI routes: shapes, streams, choices, usage, log-probabilities."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from shared.frontend.errors import ApiError
from shared.frontend.limits import Limits
from shared.frontend.prompts import PromptEncoder
from shared.messages import SamplingParams
from tests.frontend.conftest import MODEL, Server, script
from tests.frontend.tokenizers_for_tests import sentencepiece_like

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with one `[DONE]`."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert [line for line in lines if line == "data: [DONE]"] == lines[-1:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices)


def body_of(path: str) -> dict[str, Any]:
    return {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None, "absent"])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_in_one_last_chunk_if_asked_for(server: Server, path: str, options: Any, n: int) -> None:
    body = {**body_of(path), "max_tokens": 5, "n": n, "stream_options": options}
    if options == "absent":
        del body["stream_options"]
    chunks = events(server, path, body)
    if options == {"include_usage": True}:
        last = chunks.pop()
        assert last["choices"] == []
        prompt_tokens = last["usage"]["prompt_tokens"]
        assert last["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 5 * n,
            "total_tokens": prompt_tokens + 5 * n,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        whole = server.post(path, {**body_of(path), "max_tokens": 1}).json()
        assert prompt_tokens == whole["usage"]["prompt_tokens"]
    assert all(chunk.get("usage") is None for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    finishes = [choice for choice in choices if choice["finish_reason"] is not None]
    assert sorted(choice["index"] for choice in finishes) == list(range(n))
    assert all(choice["finish_reason"] == "length" for choice in finishes)
    if path == CHAT:
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:n]] == ["assistant"] * n


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_text_is_the_text(server: Server, path: str) -> None:
    body = {**body_of(path), "max_tokens": 60, "seed": 5, "n": 2}
    chunks = events(server, path, body)
    answer = server.post(path, body).json()
    for index, choice in enumerate(answer["choices"]):
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["index"] == index
        assert joined(chunks, index) == text != ""


def test_choices_are_numbered_by_prompt_and_then_by_n(server: Server) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4, "echo": True, "seed": 1}
    answer = server.post(COMPLETIONS, body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [text[:3] for text in texts] == ["one", "one", "two", "two"]
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 16
    chunks = events(server, COMPLETIONS, body)
    assert [joined(chunks, index) for index in range(4)] == texts


def test_a_flat_list_of_ids_is_one_prompt(server: Server) -> None:
    flat = server.post(COMPLETIONS, {"prompt": [40, 41], "max_tokens": 4, "echo": True, "seed": 1}).json()
    nested = server.post(COMPLETIONS, {"prompt": [[40, 41], [42, 43]], "max_tokens": 4, "seed": 1}).json()
    assert len(flat["choices"]) == 1
    assert flat["usage"]["prompt_tokens"] == 2
    assert len(nested["choices"]) == 2
    assert nested["usage"]["prompt_tokens"] == 4
    text = server.manager.prompts.decoder.decode([40, 41], skip_special_tokens=False)
    assert flat["choices"][0]["text"] == text + nested["choices"][0]["text"]


def test_choice_k_of_a_prompt_has_seed_plus_k(server: Server) -> None:
    server.engine.received.clear()
    server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 3, "seed": 40, "max_tokens": 1})
    server.post(COMPLETIONS, {"prompt": "a", "n": 2, "seed": -1, "max_tokens": 1})
    seeds = [request.sampling_params.seed for request in server.engine.requests()]
    assert seeds == [40, 41, 42, 40, 41, 42, 2**63 - 1, 0]


def test_without_a_seed_each_request_gets_its_own(server: Server) -> None:
    server.engine.received.clear()
    for _ in range(3):
        server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    seeds = {request.sampling_params.seed for request in server.engine.requests()}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sampling_fields_reach_the_engine(server: Server) -> None:
    server.engine.received.clear()
    body = {
        "prompt": "a", "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 9, "top_p": 0.25,
        "min_p": 0.125, "frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5, "seed": 3,
        "stop": "zz", "stop_token_ids": [5], "ignore_eos": True, "logit_bias": {"7": -3}, "skip_special_tokens": False,
        "no_stop_trim": True,
    }  # fmt: skip
    server.post(COMPLETIONS, body)
    (request,) = server.engine.requests()
    assert request.sampling_params == SamplingParams(
        max_new_tokens=7, min_new_tokens=2, temperature=0.5, top_k=9, top_p=0.25, min_p=0.125,
        frequency_penalty=1.0, presence_penalty=-1.0, repetition_penalty=1.5, seed=3, stop=("zz",),
        stop_token_ids=(5,), ignore_eos=True, logit_bias=((7, -3.0),), skip_special_tokens=False,
        no_stop_trim=True,
    )  # fmt: skip
    assert request.input_ids.tolist() == server.manager.prompts._backend.encode("a").ids


def test_max_tokens_is_cut_to_what_fits(server: Server) -> None:
    server.engine.received.clear()
    server.post(COMPLETIONS, {"prompt": "a" * 500, "max_tokens": 3000})
    server.post(COMPLETIONS, {"prompt": "a" * 500})
    server.post(CHAT, {"messages": [{"role": "user", "content": "a" * 470}]})
    requests = server.engine.requests()
    limits = [(len(request.input_ids), request.sampling_params.max_new_tokens) for request in requests]
    assert limits[0] == (500, 12)
    assert limits[1] == (500, 12)
    assert sum(limits[2]) == 512


@pytest.mark.parametrize("name", [MODEL, None, "absent"])
def test_the_served_model_may_be_named_or_left_out(server: Server, name: str | None) -> None:
    body = {"prompt": "a", "max_tokens": 1} | ({} if name == "absent" else {"model": name})
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200
    assert answer.json()["model"] == MODEL


@pytest.mark.parametrize("name", ["no-such", "", MODEL.upper()])
def test_another_model_is_a_404(server: Server, name: str) -> None:
    for answer in (
        server.post(COMPLETIONS, {"prompt": "a", "model": name}),
        server.post(CHAT, {"messages": USER, "model": name}),
        *([server.client.get(f"/v1/models/{name}")] if name else []),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_models(server: Server) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert server.client.get(f"/v1/models/{MODEL}").json() == model


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": "n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}],
    ],
)
def test_chats_of_all_kinds_are_answered(server: Server, messages: list[Any]) -> None:
    assert server.post(CHAT, {"messages": messages, "max_tokens": 2}).status_code == 200


def test_text_parts_are_one_text(server: Server) -> None:
    server.engine.received.clear()
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    for content in ("a b", parts):
        server.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    one, other = server.engine.requests()
    assert one.input_ids.tolist() == other.input_ids.tolist()


def test_a_tokenizer_without_a_chat_template_refuses_chats() -> None:
    encoder = PromptEncoder(sentencepiece_like(), Limits(100, 100, 1, 300))
    with pytest.raises(ApiError, match="--chat-template") as caught:
        asyncio.run(encoder.from_messages([{"role": "user", "content": "a"}], ["one"]))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(server: Server, stream: bool) -> None:
    body = {"messages": USER, "max_tokens": 20, "logprobs": True, "top_logprobs": 2, "seed": 0}
    if stream:
        chunks = events(server, CHAT, body)
        text = joined(chunks, 0)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        content = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
    else:
        (choice,) = server.post(CHAT, body).json()["choices"]
        text, content = choice["message"]["content"], choice["logprobs"]["content"]
    assert len(content) == 20
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace") == text
    assert len({entry["token"] for entry in content}) > 1
    for entry in content:
        first, second = entry["top_logprobs"]
        assert first == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert second["token"] == "<eos>"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(server: Server, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "logprobs": 2, "seed": 0}
    parts = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    if stream:
        chunks = events(server, COMPLETIONS, body)
        text = joined(chunks, 0)
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        logprobs = {name: [value for one in found for value in one[name]] for name in parts}
    else:
        (choice,) = server.post(COMPLETIONS, body).json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    assert {len(logprobs[name]) for name in parts} == {20}
    whole = [place for place, name in enumerate(logprobs["tokens"]) if not name.startswith("bytes:")]
    assert whole
    for place in whole:
        token, offset = logprobs["tokens"][place], logprobs["text_offset"][place]
        assert text[offset : offset + len(token)] == token
        assert logprobs["top_logprobs"][place] == {token: -0.5, "<eos>": -2.0}


def test_the_stop_token_has_no_bytes(server: Server) -> None:
    prompt = [40, 41]
    tokens: list[int] = []
    for _ in range(4):
        tokens.append(script(prompt, tokens, 0))
    body = {"input_ids": prompt, "sampling_params": {"seed": 0, "stop_token_ids": [tokens[3]]}}
    answer = server.post("/generate", body).json()
    assert answer["output_ids"] == tokens
    assert answer["meta_info"]["completion_tokens"] == 4
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[3]}
    more = {"prompt": prompt, "seed": 0, "stop_token_ids": [tokens[3]], "logprobs": 0}
    (choice,) = server.post(COMPLETIONS, more).json()["choices"]
    assert choice["text"] == answer["text"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == 4


def test_stop_strings_at_every_border(server: Server) -> None:
    body = {"prompt": "stop here", "max_tokens": 40, "seed": 9}
    text = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    for border in range(1, len(text), 3):
        stop = text[max(0, border - 2) : border + 2]
        wanted = text[: text.index(stop)]
        (choice,) = server.post(COMPLETIONS, {**body, "stop": [stop, "never"]}).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
        assert joined(events(server, COMPLETIONS, {**body, "stop": stop}), 0) == wanted


def test_the_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = USER
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, seed=1)
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content != ""
    assert client.models.list().data[0].id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=messages, temperature=-1)
