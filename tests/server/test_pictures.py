"""Requests with a picture: the simulated device answers for the very picture that the client sent."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from bench.sim_reference import SimReference
from tests.server.process import Server

TEXT = "What is in the picture? Describe every detail of it that you can see in a few words."
SIZES = (1, 4096, 65_536, 1_500_000)
PICTURES = [random.Random(size).randbytes(size) for size in SIZES]


def encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def flags(stage: int) -> list[str]:
    return ["--broadcast-codec", "buffer"] if stage == 3 else []


@pytest.fixture(scope="module")
def server(stage: int) -> Iterator[Server]:
    sim = ["--device", "sim", "--sim-decode-ms", "0", "--sim-prefill-us-per-token", "0"]
    with Server(
        stage,
        "--tp-size",
        "2",
        "--context-length",
        "2048",
        "--sleep-on-idle",
        "--check-determinism",
        *sim,
        *flags(stage),
    ) as server:
        yield server
        server.assert_whole()


@pytest.fixture(scope="module")
def reference() -> SimReference:
    return SimReference()


def ask(server: Server, picture: Any, text: Any = TEXT) -> Any:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return server.generate(text=text, image_data=picture, sampling_params=params)


def test_the_answer_is_that_of_the_picture_whole_and_unshared(server: Server, reference: SimReference) -> None:
    expected = [reference.solo(TEXT, 8, picture=picture).ids for picture in [None, *PICTURES]]
    assert len({tuple(ids) for ids in expected}) == len(expected)
    given = [None, *map(encoded, PICTURES)]
    for _ in range(2):  # the second time all of them are cached
        assert [ask(server, picture)["output_ids"] for picture in given] == expected
    assert [one["output_ids"] for one in ask(server, given, [TEXT] * len(given))] == expected


def test_only_the_same_picture_is_found_in_the_cache(server: Server) -> None:
    text = "A prompt that no other test has, long enough to be worth finding again in the cache."
    first = ask(server, encoded(b"first"), text)["meta_info"]
    other = ask(server, encoded(b"other"), text)["meta_info"]
    again = ask(server, encoded(b"first"), text)["meta_info"]
    assert first["prompt_tokens"] == other["prompt_tokens"] == again["prompt_tokens"]
    assert first["cached_tokens"] == other["cached_tokens"] == 0
    assert again["cached_tokens"] == again["prompt_tokens"] - 1


def test_a_data_url_is_the_picture_in_it(server: Server) -> None:
    plain = encoded(PICTURES[1])
    assert ask(server, f"data:image/png;base64,{plain}")["output_ids"] == ask(server, plain)["output_ids"]


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"text": TEXT, "image_data": "no base64!"}, "image_data"),
        ({"text": TEXT, "image_data": "data:image/png,plain"}, "image_data"),
        ({"text": TEXT, "image_data": "AAA"}, "image_data"),
        ({"text": TEXT, "image_data": ""}, "image_data"),
        ({"text": TEXT, "image_data": "ü"}, "image_data"),
        ({"text": TEXT, "image_data": 5}, "image_data"),
        ({"text": TEXT, "image_data": {"url": "x"}}, "image_data"),
        ({"text": TEXT, "image_data": ["AAAA"]}, "image_data"),
        ({"text": [TEXT], "image_data": "AAAA"}, "image_data"),
        ({"text": [TEXT, TEXT], "image_data": ["AAAA"]}, "image_data"),
        ({"text": [TEXT, TEXT], "image_data": [None, "no"]}, "image_data[1]"),
        ({"input_ids": [5] * 2040, "image_data": "AAAA"}, "image_data"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
@pytest.mark.stages(4)
def test_what_is_no_picture_is_a_400_that_names_it(server: Server, request_fields: Any, param: str) -> None:
    response = server.post("/generate", request_fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.text) < 500
