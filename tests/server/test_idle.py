"""A server without work: quiet with `--sleep-on-idle`, and still there after longer than any time-out."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.sim_reference import SimReference
from tests.server.plugin import changing
from tests.server.process import Server, title
from tests.server.trees import widest_flags

MEASURED_S = 5.0
QUIET = 0.02
"""Share of a core that a process of an idle server may use with `--sleep-on-idle`."""

BARE_SERVER = """
import uvicorn
uvicorn.run(lambda scope: None, port=0, lifespan="off", loop="uvloop", log_level="critical")
"""
"""A server without anything behind it, which ticks ten times a second as ours does."""
TIMES_A_BARE_SERVER = 4
"""Virtual machines differ by fifty in what waking up costs.  Where a bare server alone is near `QUIET`, this many times
its share is allowed; a process that spins, or keeps to its era's sleeps, uses far more on any of them."""

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
        with subprocess.Popen([sys.executable, "-c", BARE_SERVER]) as bare:
            time.sleep(2.0)
            processes = {title(process): process for process in server.tree()}
            shares = cpu_shares({**processes, "bare server": psutil.Process(bare.pid)})
            bare.kill()
        allowed = max(QUIET, TIMES_A_BARE_SERVER * shares.pop("bare server"))
        assert {name: share for name, share in shares.items() if share >= allowed} == {}
        answer = server.generate(text="Awake", sampling_params={"max_new_tokens": 12, "temperature": 0})
        assert answer["text"] == reference.solo("Awake", 12).text


def cpu_shares(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Seconds of CPU per second of each, over `MEASURED_S`."""
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    began = time.monotonic()
    time.sleep(MEASURED_S)
    measured_s = time.monotonic() - began
    return {name: (sum(process.cpu_times()[:2]) - before[name]) / measured_s for name, process in processes.items()}


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
