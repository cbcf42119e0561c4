"""Which replica a request goes to."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shared.messages import AbortReq, FlushCacheReq, GetInternalStateReq, PortArgs
from shared.server_args import ServerArgs
from stage4_peer_schedulers.data_parallel_controller import (
    DataParallelController,
    Dispatcher,
    replica_port_args,
)
from stage4_peer_schedulers.scheduler import LoadReport
from tests.stage4.scripted import request

pytestmark = pytest.mark.stages(4)


def test_round_robin_takes_turns() -> None:
    dispatcher = Dispatcher("round_robin", 3)
    assert [dispatcher.dispatch() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_burst_does_not_pile_onto_one_replica() -> None:
    dispatcher = Dispatcher("shortest_queue", 2)
    assert Counter(dispatcher.dispatch() for _ in range(10)) == {0: 5, 1: 5}


def test_the_shorter_queue_gets_the_burst_until_they_are_equal() -> None:
    dispatcher = Dispatcher("shortest_queue", 2)
    dispatcher.budget.report(LoadReport(0, 6, 0))
    assert [dispatcher.dispatch() for _ in range(6)] == [1] * 6
    assert {dispatcher.dispatch(), dispatcher.dispatch()} == {0, 1}


def test_a_report_does_not_hide_what_is_still_on_its_way() -> None:
    """Three were sent; the report was written when one of them had arrived."""
    dispatcher = Dispatcher("shortest_queue", 2)
    dispatcher.budget.report(LoadReport(1, 100, 0))
    assert [dispatcher.dispatch() for _ in range(3)] == [0, 0, 0]
    dispatcher.budget.report(LoadReport(0, 1, 1))
    assert dispatcher.budget.load(0) == 3
    dispatcher.budget.report(LoadReport(0, 0, 3))
    assert dispatcher.budget.load(0) == 0


def test_ties_rotate() -> None:
    """A replica that empties its queue at once does not get everything (case C12)."""
    dispatcher = Dispatcher("shortest_queue", 2)
    chosen = []
    for _ in range(10):
        dp_rank = dispatcher.dispatch()
        chosen.append(dp_rank)
        dispatcher.budget.report(LoadReport(dp_rank, 0, chosen.count(dp_rank)))
    assert Counter(chosen) == {0: 5, 1: 5}


def test_running_requests_count_as_load() -> None:
    """Case C12: one request every 30 ms for 6 s, each living about 400 ms."""
    dispatcher = Dispatcher("shortest_queue", 2)
    ends: list[list[int]] = [[], []]
    received = [0, 0]
    for now_ms in range(0, 6000, 30):
        for dp_rank in range(2):
            running = sum(end > now_ms for end in ends[dp_rank])
            dispatcher.budget.report(LoadReport(dp_rank, running, received[dp_rank]))
        dp_rank = dispatcher.dispatch()
        received[dp_rank] += 1
        ends[dp_rank].append(now_ms + 380 + 40 * (now_ms // 30 % 2))
    assert all(0.4 <= count / sum(received) <= 0.6 for count in received)


@pytest.fixture
def port_args() -> Iterator[PortArgs]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is too long for a socket
        yield PortArgs(folder, "", f"ipc://{folder}/scheduler", "", b"")
    assert not Path(folder).exists()


def test_a_request_goes_to_one_replica_and_a_control_message_to_all(port_args: PortArgs) -> None:
    controller = DataParallelController(ServerArgs(dp_size=2), port_args)
    replicas = []
    for dp_rank in range(2):
        replica = zmq.Context.instance().socket(zmq.PULL)
        replica.setsockopt(zmq.RCVTIMEO, 10_000)
        replica.bind(replica_port_args(port_args, dp_rank).scheduler_input_ipc_name)
        replicas.append(replica)
    controls = [AbortReq("a"), FlushCacheReq("f"), GetInternalStateReq("s")]
    for message in [request("a", [5]), *controls, request("b", [5])]:
        controller.dispatch(message)
    first, second = ([replica.recv_pyobj() for _ in range(4)] for replica in replicas)
    assert (first[0].rid, first[1:]) == ("a", controls)
    assert (second[3].rid, second[:3]) == ("b", controls)
    for replica in replicas:
        replica.close()
