"""Two nodes, here as two launches on one machine that share one address."""

from __future__ import annotations

import socket

import pytest

from tests.server.process import Server, title, wait_gone

pytestmark = pytest.mark.stages(3)

GONE_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_nodes_answer_as_one_and_the_loss_of_one_ends_the_other_though_idle() -> None:
    nodes = ("--device", "sim", "--tp-size", "2", "--nnodes", "2", "--sleep-on-idle")
    nodes += ("--dist-init-addr", f"127.0.0.1:{free_port()}")
    first = Server(3, *nodes, "--node-rank", "0", wait=False)
    second = Server(3, *nodes, "--node-rank", "1", wait=False)
    try:
        first.wait_ready()
        assert [title(process) for process in second.tree()] == ["stage3: main", "stage3: model TP1"]
        answer = first.generate(text="hello", sampling_params={"max_new_tokens": 12, "temperature": 0})
        assert answer["meta_info"]["completion_tokens"] > 0
        everything = first.tree() + second.tree()
        second.find("stage3: model TP1").kill()
        assert second.wait_exit(GONE_S) == 1
        assert first.wait_exit(GONE_S) == 1
        assert wait_gone(everything, GONE_S) == []
    finally:
        for server in (first, second):
            server.clean_up()
