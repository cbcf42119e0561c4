"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from stage2_static_dp.manager_multi import Dispatcher

pytestmark = pytest.mark.stages(2)


@dataclass(eq=False)
class Worker:
    name: str
    load: int = 0


def names(dispatcher: Dispatcher, n: int) -> list[str]:
    return [dispatcher.choose().name for _ in range(n)]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    workers = [Worker("a", load=9), Worker("b"), Worker("c", load=3)]
    assert names(Dispatcher("round_robin", workers), 7) == ["a", "b", "c", "a", "b", "c", "a"]


def test_round_robin_goes_on_with_the_replicas_that_are_left() -> None:
    workers = [Worker("a"), Worker("b"), Worker("c")]
    dispatcher = Dispatcher("round_robin", workers)
    names(dispatcher, 2)
    workers.pop()
    assert sorted(names(dispatcher, 4)) == ["a", "a", "b", "b"]


def test_shortest_queue_takes_the_least_loaded() -> None:
    workers = [Worker("a", load=2), Worker("b", load=1), Worker("c", load=3)]
    assert names(Dispatcher("shortest_queue", workers), 1) == ["b"]


def test_shortest_queue_rotates_between_equals() -> None:
    workers = [Worker("a"), Worker("b"), Worker("c")]
    assert names(Dispatcher("shortest_queue", workers), 6) == ["a", "b", "c", "a", "b", "c"]


def test_shortest_queue_spreads_requests_that_live_longer_than_the_queue_does() -> None:
    workers = [Worker("a"), Worker("b")]
    dispatcher = Dispatcher("shortest_queue", workers)
    living: list[Worker] = []
    given: Counter[str] = Counter()
    for _ in range(200):
        worker = dispatcher.choose()
        given[worker.name] += 1
        worker.load += 1
        living.append(worker)
        if len(living) > 13:
            living.pop(0).load -= 1
    assert 80 <= given["a"] <= 120
