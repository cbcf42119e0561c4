"""A server without work: quiet with `--sleep-on-idle`, and still there after longer than any time-out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.sim_reference import SimReference
from tests.server.plugin import changing
from tests.server.process import Server, title
from tests.server.trees import widest_flags

MEASURED_S = 5.0
QUIET = 0.02
"""Share of a core that a process of an idle server may use with `--sleep-on-idle`."""

SHORT_TIMEOUT = """
def change(tp_group):
    from datetime import timedelta

    tp_group.PROCESS_GROUP_TIMEOUT = min(tp_group.PROCESS_GROUP_TIMEOUT, timedelta(seconds=8))
"""
IDLE_S = 20.0
"""Longer than the patched time-out by a good deal."""


def test_an_idle_server_that_sleeps_uses_almost_nothing(stage: int) -> None:
    reference = SimReference()
    with Server(stage, "--device", "sim", "--sleep-on-idle", *widest_flags(stage)) as server:
        for i in range(4):  # more than replicas
            answer = server.generate(text=f"Nr {i}", sampling_params={"max_new_tokens": 12, "temperature": 0})
            assert answer["text"] == reference.solo(f"Nr {i}", 12).text
        time.sleep(1.0)
        processes = {title(process): process for process in server.tree()}
        before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        began = time.monotonic()
        time.sleep(MEASURED_S)
        measured_s = time.monotonic() - began
        after = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        shares = {name: (after[name] - before[name]) / measured_s for name in processes}
        assert {name: share for name, share in shares.items() if share >= QUIET} == {}
        answer = server.generate(text="Awake", sampling_params={"max_new_tokens": 12, "temperature": 0})
        assert answer["text"] == reference.solo("Awake", 12).text


@pytest.mark.stages(3, 4)
def test_ranks_outlive_a_quiet_time_longer_than_their_time_out(stage: int, tmp_path: Path) -> None:
    """Case C04: between requests the ranks keep meeting, so that no collective waits for the next request.

    A server that sleeps and one that spins pass that time side by side.
    """
    env = changing("shared.parallel.tp_group", SHORT_TIMEOUT, tmp_path)
    flags = ("--device", "sim", "--tp-size", "2")
    with Server(stage, *flags, "--sleep-on-idle", env=env) as sleeping, Server(stage, *flags, env=env) as spinning:
        servers = {"sleeping": sleeping, "spinning": spinning}
        before = {name: [process.pid for process in server.tree()] for name, server in servers.items()}
        time.sleep(IDLE_S)
        expected = SimReference().solo("Good morning", 12).text
        params = {"max_new_tokens": 12, "temperature": 0}
        for name, server in servers.items():
            assert server.generate(text="Good morning", sampling_params=params)["text"] == expected, name
            assert [process.pid for process in server.tree()] == before[name], name
            assert "ERROR" not in server.output, name
