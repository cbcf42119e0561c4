"""A slow rank is not a dead one, and servers do not meet: not on ports, not in names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.plugin import changing
from tests.server.process import Server
from tests.server.trees import widest_flags

SHORT_REQUESTS = """
def change(protocol):
    protocol.DEFAULT_CONFIG["sync_request_timeout"] = 0.2
"""
SLOW_PREFILL_US_PER_TOKEN = 200_000
"""A prompt of ten tokens takes two seconds: ten times rpyc's patched time-out."""


@pytest.mark.stages(1, 2)
def test_a_step_may_take_longer_than_rpyc_waits_by_default(stage: int, tmp_path: Path) -> None:
    """Case C05."""
    env = changing("rpyc.core.protocol", SHORT_REQUESTS, tmp_path)
    flags = ("--device", "sim", "--sim-prefill-us-per-token", str(SLOW_PREFILL_US_PER_TOKEN))
    with Server(stage, *flags, *widest_flags(stage), env=env) as server:
        answer = server.generate(input_ids=list(range(10, 20)), sampling_params={"max_new_tokens": 2})
        assert answer["meta_info"]["completion_tokens"] == 2
        server.assert_whole()


def test_two_servers_started_at_once_keep_to_themselves(stage: int) -> None:
    """Case C06."""
    names = ("left", "right")
    flags = ("--device", "sim", *widest_flags(stage))
    servers = [Server(stage, *flags, "--served-model-name", name, wait=False) for name in names]
    try:
        for server in servers:
            server.wait_ready()
        for server, own, other in zip(servers, names, reversed(names), strict=True):
            body = {"prompt": "x", "max_tokens": 2}
            assert server.post("/v1/completions", {**body, "model": own}).json()["model"] == own
            assert server.post("/v1/completions", {**body, "model": other}).status_code == 404
        assert [server.stop() for server in servers] == [0, 0]
    finally:
        for server in servers:
            server.clean_up()
