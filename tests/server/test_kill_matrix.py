"""Whatever process ends, by whatever signal, nothing of the server is left and nobody waits in vain."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from shared.launch.http_socket import bind_http_socket
from tests.conftest import existing_stages
from tests.server.process import Server, title, wait_gone
from tests.server.streams import CLOSED, ERROR, FINISHED, Streams
from tests.server.trees import one_of_each_role, planned_tree, titles, widest_flags

WITHIN_S = 5.0
SIM = ("--device", "sim", "--sim-decode-ms", "25")
"""256 tokens take more than six seconds: no stream is over before the kill."""

Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Server] = []

    def start_server(stage: int, *flags: str, wait: bool = True) -> Server:
        servers.append(Server(stage, *SIM, *flags, wait=wait))
        return servers[-1]

    yield start_server
    for server in servers:
        server.clean_up()


def assert_all_gone(server: Server, everything: list[psutil.Process], since: float) -> None:
    """Within five seconds of `since` no process, no listener, no run directory is left."""
    left = wait_gone(everything, within=max(0.1, since + WITHIN_S - time.monotonic()))
    assert left == [], f"still alive: {[title(process) for process in left]}"
    if server.url:
        address = urlsplit(server.url)
        assert address.hostname is not None and address.port is not None
        bind_http_socket(address.hostname, address.port).close()


def assert_named_once(server: Server, process: psutil.Process, wanted: str) -> None:
    """One line says that this process died; nothing else in the log looks like the cause."""
    said = re.findall(rf"ERROR {re.escape(wanted)} \(pid {process.pid}\) died", server.output)
    assert len(said) == 1, server.output
    assert "Traceback" not in server.output


def kills() -> Iterator[Any]:
    """Every role of every stage: with replicas where the stage has them, and those of one replica alone."""
    for stage in existing_stages():
        done: set[str] = set()
        for flags in dict.fromkeys([widest_flags(stage), ("--tp-size", "2")]):
            for wanted in one_of_each_role(planned_tree(stage, *flags)):
                one_replica_of_two = stage == 2 and "DP" in wanted
                if wanted not in done and not one_replica_of_two:
                    yield pytest.param(
                        stage, flags, wanted, marks=pytest.mark.stages(stage), id=f"{wanted} of {' '.join(flags)}"
                    )
            done |= {wanted for wanted in titles(planned_tree(stage, *flags)) if "main" in wanted}
            done.add(f"stage{stage}: detokenizer")


@pytest.mark.parametrize(("number", "flags", "wanted"), list(kills()))
def test_the_death_of_any_process_ends_the_server(
    start: Start, number: int, flags: tuple[str, ...], wanted: str
) -> None:
    server = start(number, *flags)
    everything = server.everything()
    streams = Streams(server, 8, 256)
    streams.wait_begun()
    victim = server.find(wanted)
    killed_at = time.monotonic()
    victim.kill()
    streams.join(killed_at + WITHIN_S)
    assert_all_gone(server, everything, killed_at)
    assert set(streams.outcomes) <= {ERROR, CLOSED}, streams.outcomes
    if victim.pid == server.pid:
        assert server.wait_exit(1) == -signal.SIGKILL
        return
    assert server.wait_exit(1) == 1
    assert_named_once(server, victim, wanted)
    assert server.run_dirs() == []


@pytest.mark.stages(2)
def test_stage_2_outlives_all_replicas_but_the_last(start: Start) -> None:
    server = start(2, "--tp-size", "2", "--dp-size", "2")
    everything = server.everything()
    streams = Streams(server, 8, 256)
    streams.wait_begun()
    victim = server.find("stage2: model DP0 TP1")
    victim.kill()
    killed_at = time.monotonic()
    streams.join(killed_at + 60)
    assert sorted(map(str, streams.outcomes)) == sorted([ERROR] * 4 + [FINISHED] * 4)
    assert all(
        ended_at < killed_at + WITHIN_S
        for ended_at, outcome in zip(streams.ended_at, streams.outcomes, strict=True)
        if outcome == ERROR
    )
    assert_named_once(server, victim, "stage2: model DP0 TP1")
    alive = {title(process) for process in server.tree()}
    assert alive == set(titles(planned_tree(2, "--tp-size", "2", "--dp-size", "2"))) - {
        "stage2: model DP0 TP0",
        "stage2: model DP0 TP1",
    }
    for _ in range(4):
        answer = server.generate(text="still there?", sampling_params={"max_new_tokens": 3})
        assert answer["meta_info"]["completion_tokens"] == 3
    assert server.client.get("/health").status_code == 200
    assert len(server.info()["internal_states"]) == 2

    streams = Streams(server, 8, 256)
    streams.wait_begun()
    last = server.find("stage2: model DP1 TP0")
    killed_at = time.monotonic()
    last.kill()
    streams.join(killed_at + WITHIN_S)
    assert_all_gone(server, everything, killed_at)
    assert set(streams.outcomes) <= {ERROR, CLOSED}
    assert server.wait_exit(1) == 1
    assert_named_once(server, last, "stage2: model DP1 TP0")


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT to the group", "SIGTERM to the group"])
def test_a_signal_ends_the_server_in_order(start: Start, stage: int, how: str) -> None:
    server = start(stage, "--tp-size", "2")
    everything = server.everything()
    streams = Streams(server, 8, 256)
    streams.wait_begun()
    asked_at = time.monotonic()
    if how == "SIGTERM":
        server.process.send_signal(signal.SIGTERM)
    else:
        server.signal_group(signal.SIGINT if "SIGINT" in how else signal.SIGTERM)
    streams.join(asked_at + WITHIN_S)
    assert_all_gone(server, everything, asked_at)
    assert set(streams.outcomes) <= {ERROR, CLOSED}
    assert server.wait_exit(1) == 0, server.output
    assert server.run_dirs() == []
    assert " died" not in server.output and "Traceback" not in server.output


def wait_for_child(server: Server, wanted: str) -> psutil.Process:
    deadline = time.monotonic() + 60
    while True:
        for process in server.everything():
            if title(process) == wanted:
                return process
        assert time.monotonic() < deadline, f"{wanted} has not been started:\n{server.output}"
        time.sleep(0.005)


def test_a_rank_that_dies_during_the_start_ends_the_start(start: Start, stage: int) -> None:
    flags = widest_flags(stage)
    *_, deepest = titles(planned_tree(stage, *flags))
    server = start(stage, *flags, wait=False)
    victim = wait_for_child(server, deepest)
    everything = server.everything()
    killed_at = time.monotonic()
    victim.kill()
    assert_all_gone(server, everything, killed_at)
    assert server.wait_exit(1) == 1
    assert_named_once(server, victim, deepest)
    assert "died before it was ready" in server.output
    assert server.url == "" and server.run_dirs() == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_told_to_end_during_the_start_leaves_nothing(
    start: Start, stage: int, signum: signal.Signals
) -> None:
    flags = widest_flags(stage)
    *_, deepest = titles(planned_tree(stage, *flags))
    server = start(stage, *flags, wait=False)
    wait_for_child(server, deepest)
    everything = server.everything()
    asked_at = time.monotonic()
    server.process.send_signal(signum)
    assert_all_gone(server, everything, asked_at)
    assert server.wait_exit(1) == (0 if signum == signal.SIGTERM else -signal.SIGKILL), server.output
    if signum == signal.SIGTERM:
        assert server.run_dirs() == []
