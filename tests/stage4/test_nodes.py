"""Two nodes, here on one loopback address."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.server.process import Server, title
from tests.stage4.scripted import request, run

pytestmark = pytest.mark.stages(4)

PROMPT = [1, 70, 80, 90, 100]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_nodes_answer_as_one_and_end_together() -> None:
    flags = ["--device", "sim", "--sim-decode-ms", "1", "--tp-size", "2", "--sleep-on-idle", "--nnodes", "2"]
    flags += ["--dist-init-addr", f"127.0.0.1:{free_port()}", "--check-determinism"]
    env = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    node1 = Server(4, *flags, "--node-rank", "1", wait=False, env=env)
    try:
        with Server(4, *flags, "--node-rank", "0", env=env) as node0:
            assert [title(process) for process in node1.tree()] == ["stage4: main", "stage4: scheduler TP1"]
            assert [title(process) for process in node0.tree()] == [
                "stage4: main",
                "stage4: detokenizer",
                "stage4: scheduler TP0",
            ]
            params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
            answer = node0.generate(input_ids=PROMPT, sampling_params=params)
            alone = run({0: [request("r", PROMPT, max_new_tokens=20, ignore_eos=True)]}, overlap=True, device="sim")
            assert answer["output_ids"] == alone["r"].ids

            node1.find("stage4: scheduler TP1").kill()
            assert node1.wait_exit(within=10) == 1
            assert node0.wait_exit(within=10) == 1
            assert "stage4: scheduler TP0" in node0.output
    finally:
        node1.clean_up()
