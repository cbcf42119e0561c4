"""Hundreds of requests of every kind at once: none lost, none answered twice, none disturbed by another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from bench.sim_reference import SimReference
from tests.conftest import existing_stages
from tests.server.process import Server, title
from tests.server.trees import widest_flags

SMALL_POOL = ("--max-total-tokens", "1500", "--schedule-conservativeness", "0.0")
"""Slots for about ten of the longer requests: the others wait, and running ones are retracted."""
FLAGS = ("--device", "sim", "--sim-decode-ms", "1", "--chunked-prefill-size", "256", "--check-determinism", *SMALL_POOL)


@dataclass(frozen=True)
class Job:
    """One request.  `kind` is what the client does; `new_tokens` what it asks for."""

    number: int
    kind: str
    prompt: list[int]
    new_tokens: int
    seed: int | None

    @property
    def rid(self) -> str:
        return f"job-{self.number}"

    def native(self, **more: Any) -> dict[str, Any]:
        params: dict[str, Any] = {"max_new_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}
        if self.seed is not None:
            params |= {"temperature": 1.0, "seed": self.seed}
        return {"rid": self.rid, "input_ids": self.prompt, "sampling_params": params | more.pop("params", {}), **more}

    def openai(self, **more: Any) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }


KINDS = ("whole", "stream", "openai", "openai stream", "n=2", "stop", "abort", "disconnect", "waiting gone")


def jobs(count: int) -> list[Job]:
    """Requests of all kinds in turn; most prompts begin like others, some have nothing in common."""
    random_ = random.Random(count)
    prefixes = [[random_.randrange(3, 290) for _ in range(length)] for length in (0, 5, 40, 90)]
    made = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        tail = [random_.randrange(3, 290) for _ in range(random_.randrange(1, 30))]
        new_tokens = 400 if kind in ("abort", "disconnect", "waiting gone") else random_.randrange(1, 48)
        seed = number if kind in ("whole", "stream") and number % 2 else None
        made.append(Job(number, kind, random_.choice(prefixes) + tail, new_tokens, seed))
    return made


@dataclass
class Answer:
    """What came back: texts by choice index, ids where the route gives them, and how often an end was told."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: list[int] | None = None
    ends: int = 0
    finish: str | None = None


class Clients:
    """Everything that the jobs' clients do, on one asyncio event loop."""

    def __init__(self, client: httpx.AsyncClient, reference: SimReference) -> None:
        self._client = client
        self._reference = reference

    async def run(self, job: Job) -> Answer:
        do: dict[str, Callable[[Job], Awaitable[Answer]]] = {
            "whole": self._whole,
            "stream": self._stream,
            "openai": self._openai,
            "openai stream": self._openai_stream,
            "n=2": self._n_2,
            "stop": self._stop,
            "abort": self._abort,
            "disconnect": self._disconnect,
            "waiting gone": self._waiting_gone,
        }
        return await do[job.kind](job)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self._client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def _events(self, path: str, body: dict[str, Any]) -> Any:
        async with self._client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            done = 0
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done += 1
                elif line:
                    assert not done, "an event after [DONE]"
                    yield json.loads(line.removeprefix("data: "))
            assert done == 1

    async def _whole(self, job: Job) -> Answer:
        return _native_answer(job, [await self._post("/generate", job.native())])

    async def _stream(self, job: Job) -> Answer:
        return _native_answer(job, [event async for event in self._events("/generate", job.native())])

    async def _openai(self, job: Job) -> Answer:
        return _openai_answer([await self._post("/v1/completions", job.openai())])

    async def _openai_stream(self, job: Job) -> Answer:
        return _openai_answer([event async for event in self._events("/v1/completions", job.openai())])

    async def _n_2(self, job: Job) -> Answer:
        return _openai_answer([await self._post("/v1/completions", job.openai(n=2))])

    async def _stop(self, job: Job) -> Answer:
        stop = stop_string(self._reference.solo(job.prompt, job.new_tokens).text)
        events = self._events("/generate", job.native(params={"stop": stop}))
        return _native_answer(job, [event async for event in events])

    async def _abort(self, job: Job) -> Answer:
        """Aborts the request by its id, at a moment that may find it anywhere."""
        answering = asyncio.create_task(self._post("/generate", job.native()))
        while not answering.done():
            await asyncio.sleep(0.05 + job.number % 7 / 10)
            await self._post("/abort_request", {"rid": job.rid})
        return _native_answer(job, [await answering])

    async def _disconnect(self, job: Job) -> Answer:
        events = []
        async with self._client.stream("POST", "/generate", json=job.native(stream=True)) as response:
            async for line in response.aiter_lines():
                events.append(line)
                if len(events) > 4:
                    break
        return Answer()

    async def _waiting_gone(self, job: Job) -> Answer:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._client.post("/generate", json=job.native()), 0.3)
        return Answer()


def stop_string(text: str) -> str:
    """Two printable characters from the middle of `text`, or something that is not in it."""
    middle = len(text) // 2
    for start in range(middle, len(text) - 1):
        if text[start : start + 2].isascii() and text[start : start + 2].isprintable():
            return text[start : start + 2]
    return "not in any text"


def _native_answer(job: Job, events: list[Any]) -> Answer:
    """A stream's chunks hold everything so far, so the last one is the answer."""
    last = events[-1]
    assert last["meta_info"]["id"] == job.rid
    ends = [event for event in events if event["meta_info"]["finish_reason"] is not None]
    return Answer({0: last["text"]}, last["output_ids"], len(ends), last["meta_info"]["finish_reason"]["type"])


def _openai_answer(events: list[Any]) -> Answer:
    answer = Answer()
    for event in events:
        for choice in event["choices"]:
            answer.texts[choice["index"]] = answer.texts.get(choice["index"], "") + choice["text"]
            answer.ends += choice["finish_reason"] is not None
            answer.finish = choice["finish_reason"] or answer.finish
    return answer


def check(job: Job, answer: Answer, reference: SimReference) -> None:
    if job.kind in ("disconnect", "waiting gone"):
        return
    solo = reference.solo(job.prompt, job.new_tokens, job.seed)
    if job.kind == "abort":
        assert answer.ends == 1
        assert answer.ids == solo.ids[: len(answer.ids or [])]
        assert answer.finish == ("length" if answer.ids == solo.ids else "abort")
        return
    choices = 2 if job.kind == "n=2" else 1
    text = solo.text
    if job.kind == "stop":
        stop = stop_string(text)
        text = text.partition(stop)[0]
        assert answer.finish == ("stop" if stop in solo.text else "length")
    elif answer.ids is not None:
        assert answer.ids == solo.ids
    assert answer.texts == dict.fromkeys(range(choices), text)
    assert answer.ends == choices


@pytest.fixture(scope="module")
def reference() -> SimReference:
    return SimReference()


def loads() -> Iterator[Any]:
    for stage in existing_stages():
        if stage == 1:
            yield pytest.param(1, (), 200, id="stage1-tp1", marks=pytest.mark.stages(1))
        flags = widest_flags(stage)
        yield pytest.param(stage, flags, 500, id=f"stage{stage}", marks=pytest.mark.stages(stage))


@pytest.mark.parametrize(("number", "flags", "count"), list(loads()))
def test_mixed_requests_at_once_lose_nothing(
    number: int, flags: tuple[str, ...], count: int, reference: SimReference
) -> None:
    with Server(number, *FLAGS, *flags) as server:
        before = [(process.pid, title(process)) for process in server.tree()]
        todo = jobs(count)

        async def run_all() -> list[Answer]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
                clients = Clients(client, reference)
                return await asyncio.gather(*[clients.run(job) for job in todo])

        answers = asyncio.run(run_all())
        assert len(answers) == count
        for job, answer in zip(todo, answers, strict=True):
            check(job, answer, reference)
        server.assert_whole(within=10)
        states = server.info()["internal_states"]
        assert all(state["forwards"] > 0 for state in states)
        assert sum(state["retractions"] for state in states) > 0, "the pool was not small enough"
        assert [(process.pid, title(process)) for process in server.tree()] == before
        assert server.info()["live_requests"] == 0
        assert "ERROR" not in server.output, server.output
