"""Servers whose weights are not float32."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.process import Server

REQUEST = {
    "text": "Once upon a time there was",
    "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
}


def last_event(server: Server) -> Any:
    with server.client.stream("POST", "/generate", json={**REQUEST, "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return json.loads(events[-1])


@pytest.mark.stages(1)
@pytest.mark.parametrize(
    "flags", [("--quantization", "int8"), ("--quantization", "float16"), ("--dtype", "bfloat16")], ids=" ".join
)
def test_it_answers_alike_streamed_or_not_and_on_all_ranks(flags: tuple[str, ...]) -> None:
    with Server(1, "--tp-size", "2", "--check-determinism", *flags) as server:
        answer = server.generate(**REQUEST)
        assert answer["meta_info"]["completion_tokens"] == 24
        server.post("/flush_cache", {}).raise_for_status()
        assert last_event(server)["text"] == answer["text"]
        server.assert_whole()
