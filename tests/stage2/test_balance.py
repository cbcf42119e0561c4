"""Case C12 on running servers: requests that run are load, though every queue is empty."""

from __future__ import annotations

import threading
import time

import pytest

from tests.server.process import Server

pytestmark = pytest.mark.stages(2, 3)

FLAGS = ("--device", "sim", "--sim-decode-ms", "20", "--dp-size", "2", "--load-balance-method", "shortest_queue")


def test_steady_requests_keep_both_replicas_busy(stage: int) -> None:
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 20}
    with Server(stage, *FLAGS, "--sleep-on-idle") as server:
        threads = [
            threading.Thread(target=lambda: server.generate(text="steady", sampling_params=params)) for _ in range(60)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.03)
        for thread in threads:
            thread.join()
        server.assert_whole()
        assert server.post("/flush_cache", {}).json()["success"]
        forwards = [state["forwards"] for state in server.info()["internal_states"]]
    assert 0.4 <= forwards[0] / sum(forwards) <= 0.6, forwards
