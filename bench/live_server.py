"""A server under measurement, and the calls that the suites make on it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.plan import Setup
from bench.server_process import ServerProcess

VOCAB = 256
"""Ids below this are in every model's vocabulary."""

Prompts = list[list[int]]


class LiveServer:
    """A server that is ready.  `ready_s` is the time from its start to that."""

    def __init__(self, setup: Setup, process: ServerProcess, ready_s: float) -> None:
        self.setup = setup
        self.url = process.url
        self.ready_s = ready_s
        self._process = process
        self._client = httpx.Client(base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=None))
        self._rng = np.random.default_rng(0)

    def fresh_prompts(self, count: int, length: int) -> Prompts:
        """Random ids: no two prompts share a prefix worth caching."""
        prompts: Prompts = self._rng.integers(10, VOCAB, (count, length)).tolist()
        return prompts

    def generate(self, prompts: Prompts, new_tokens: int, picture: bytes | None = None) -> list[Any]:
        """Greedy answers to all prompts, sent in one HTTP request; every one must have `new_tokens` tokens."""
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompts, "sampling_params": params}
        if picture is not None:
            body["image_data"] = [base64.b64encode(picture).decode()] * len(prompts)
        response = self._client.post("/generate", json=body)
        response.raise_for_status()
        answers: list[Any] = response.json()
        if any(len(answer["output_ids"]) != new_tokens for answer in answers):
            raise RuntimeError(f"{self.setup.name}: an answer has the wrong number of tokens")
        return answers

    @contextmanager
    def background(self, count: int, new_tokens: int) -> Iterator[None]:
        """Keeps `count` requests running meanwhile, for `new_tokens` tokens at most."""
        rids = [f"background-{time.monotonic_ns()}-{i}" for i in range(count)]
        params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": self.fresh_prompts(count, 16), "sampling_params": params, "rid": rids}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._client.post, "/generate", json=body)
            try:
                self._wait_running(count)
                yield
                if answer.done():
                    raise RuntimeError(f"{self.setup.name}: the background ended before the measurement")
            finally:
                for rid in rids:
                    self._client.post("/abort_request", json={"rid": rid})

    def _wait_running(self, count: int) -> None:
        while sum(state["running"] for state in self.states()) < count:
            time.sleep(0.005)

    def states(self) -> list[dict[str, Any]]:
        """The state of every replica."""
        response = self._client.get("/get_server_info")
        response.raise_for_status()
        states: list[dict[str, Any]] = response.json()["internal_states"]
        return states

    def processes(self) -> dict[str, psutil.Process]:
        """Every process of the server by the last words of its title: `main`, `model_TP0`."""
        main = psutil.Process(self._process.pid)
        found = {"main": main}
        for child in main.children(recursive=True):
            title = " ".join(child.cmdline()).strip()
            if title.startswith(f"stage{self.setup.stage}: "):
                found[title.partition(": ")[2].replace(" ", "_")] = child
        return found


@contextmanager
def serving(setup: Setup, trace_dir: Path | None) -> Iterator[LiveServer]:
    """The server of `setup`; on leaving, it has stopped and its trace in `trace_dir` is complete."""
    trace = [] if trace_dir is None else ["--trace-dir", str(trace_dir)]
    start = time.monotonic()
    with ServerProcess(setup.stage, [*setup.command_line(), *trace]) as process:
        server = LiveServer(setup, process, time.monotonic() - start)
        try:
            yield server
        finally:
            server._client.close()
