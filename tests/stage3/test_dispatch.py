"""Which replica a request goes to, and what counts as load."""

from __future__ import annotations

import multiprocessing
from collections import Counter

import numpy as np
import pytest

from shared.messages import SamplingParams, TokenizedGenerateReqInput
from stage3_broadcast.controller_multi import Dispatcher, Replica
from stage3_broadcast.controller_single import ReplicaQueue

pytestmark = pytest.mark.stages(3)


def make_replicas(n: int) -> list[Replica]:
    context = multiprocessing.get_context("spawn")
    replicas = [Replica(ReplicaQueue(context.Queue(), context.Value("q", 0))) for _ in range(n)]
    for replica in replicas:
        replica.queue.requests.cancel_join_thread()  # nobody reads them
    return replicas


def dispatch(dispatcher: Dispatcher, replicas: list[Replica], n: int) -> list[int]:
    chosen = []
    for i in range(n):
        chosen.append(dispatcher.choose())
        req = TokenizedGenerateReqInput(str(i), np.array([1], dtype=np.int64), SamplingParams())
        replicas[chosen[-1]].dispatch(req)
    return chosen


def test_round_robin_takes_turns() -> None:
    replicas = make_replicas(3)
    assert dispatch(Dispatcher("round_robin", replicas), replicas, 5) == [0, 1, 2, 0, 1]


def test_a_request_is_load_until_the_replica_has_finished_it_though_the_queue_is_empty() -> None:
    replicas = make_replicas(2)
    dispatcher = Dispatcher("shortest_queue", replicas)
    assert dispatch(dispatcher, replicas, 1) == [0]
    replicas[0].queue.requests.get(timeout=10)
    assert [replica.load for replica in replicas] == [1, 0]
    assert dispatch(dispatcher, replicas, 1) == [1]
    replicas[1].queue.finished.value += 1
    assert dispatch(dispatcher, replicas, 1) == [1]


def test_shortest_queue_spreads_requests_that_live_longer_than_the_queue_does() -> None:
    replicas = make_replicas(2)
    dispatcher = Dispatcher("shortest_queue", replicas)
    living: list[int] = []
    given: Counter[int] = Counter()
    for _ in range(200):
        (chosen,) = dispatch(dispatcher, replicas, 1)
        given[chosen] += 1
        living.append(chosen)
        if len(living) > 13:
            replicas[living.pop(0)].queue.finished.value += 1
    assert 80 <= given[0] <= 120
