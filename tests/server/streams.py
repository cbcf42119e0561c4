"""Streaming clients on threads of their own, and how each one's stream ended."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

from tests.server.process import Server

FINISHED = "finished"
ERROR = "error event"
CLOSED = "closed connection"


class Streams:
    """`count` streams of `/generate`.  `outcomes` and `ended_at` (monotonic seconds) tell how each ended."""

    def __init__(self, server: Server, count: int, new_tokens: int, **request: Any) -> None:
        self.outcomes: list[str | None] = [None] * count
        self.ended_at = [0.0] * count
        self.errors: list[str] = []
        self._request = {
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            "stream": True,
            **request,
        }
        self._url = server.url
        self._begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def wait_begun(self) -> None:
        """Until every stream has had its first chunk."""
        for _ in self._threads:
            assert self._begun.acquire(timeout=60), "a stream has not begun"

    def join(self, deadline: float) -> None:
        """Waits for all ends until `deadline` (monotonic seconds)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _read(self, i: int) -> None:
        outcome: str | None = None
        request = {"text": f"Stream number {i} begins", **self._request}
        try:
            with httpx.stream("POST", self._url + "/generate", json=request, timeout=120) as response:
                for line in response.iter_lines():
                    if outcome is None:
                        outcome = CLOSED
                        self._begun.release()
                    if line == "data: [DONE]":
                        outcome = FINISHED
                    elif line.startswith("data: ") and "error" in (event := json.loads(line[6:])):
                        outcome = ERROR
                        self.errors.append(event["error"]["message"])
        except httpx.TransportError:
            pass
        self.ended_at[i] = time.monotonic()
        self.outcomes[i] = outcome or CLOSED
