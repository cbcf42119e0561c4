"""The radix cache against a plain dictionary of sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.mem_cache.radix_cache import RadixCache, TreeNode


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_locked_path_is_not_evicted_and_can_be_afterwards() -> None:
    cache = RadixCache()
    cache.insert(ids(list(range(1, 9))), np.arange(8))
    match = cache.match_prefix(ids(list(range(1, 9))))
    assert match.slots.tolist() == list(range(8))
    cache.lock(match.node)
    assert len(cache.evict(100)) == 0
    assert (cache.evictable_size, cache.protected_size) == (0, 8)
    cache.unlock(match.node)
    assert sorted(cache.evict(100)) == list(range(8))
    assert cache.match_length(ids([1, 2])) == 0


def test_a_lock_on_part_of_a_node_protects_just_that_part() -> None:
    cache = RadixCache()
    cache.insert(ids([1, 2, 3, 4, 5]), np.arange(5))
    match = cache.match_prefix(ids([1, 2, 3, 9]))
    cache.lock(match.node)
    assert sorted(cache.evict(100)) == [3, 4]
    assert cache.match_length(ids([1, 2, 3, 4])) == 3


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache()
    for first in (1, 2, 3):
        cache.insert(ids([first, 10]), ids([first * 2, first * 2 + 1]))
    cache.match_prefix(ids([1, 10]))
    assert sorted(cache.evict(2)) == [4, 5]
    assert sorted(cache.evict(1)) == [6, 7]
    assert cache.match_length(ids([1, 10])) == 2


def test_insert_keeps_the_slots_that_were_there() -> None:
    cache = RadixCache()
    cache.insert(ids([1, 2, 3]), ids([10, 11, 12]))
    matched, _ = cache.insert(ids([1, 2, 4]), ids([20, 21, 22]))
    assert matched == 2
    assert cache.match_prefix(ids([1, 2, 4])).slots.tolist() == [10, 11, 22]


def test_drop_tail_spares_what_others_use() -> None:
    cache = RadixCache()
    cache.insert(ids([1, 2, 3, 4]), ids([0, 1, 2, 3]))
    cache.insert(ids([1, 2, 9]), ids([0, 1, 5]))
    node = cache.match_prefix(ids([1, 2, 3, 4])).node
    assert sorted(cache.drop_tail(node, 4)) == [2, 3]
    assert cache.match_length(ids([1, 2, 9])) == 3


SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class RadixMachine(RuleBasedStateMachine):
    """Every operation in any order; the model is the set of cached sequences with their slots."""

    @initialize()
    def start(self) -> None:
        self.cache = RadixCache()
        self.slots: dict[tuple[int, ...], int] = {}
        self.locks: list[tuple[TreeNode, list[int]]] = []
        self.next_slot = 0

    def cached_length(self, sequence: list[int]) -> int:
        n = 0
        while n < len(sequence) and tuple(sequence[: n + 1]) in self.slots:
            n += 1
        return n

    @rule(sequence=SEQUENCE)
    def insert(self, sequence: list[int]) -> None:
        fresh = np.arange(self.next_slot, self.next_slot + len(sequence))
        self.next_slot += len(sequence)
        matched, _ = self.cache.insert(ids(sequence), fresh)
        assert matched == self.cached_length(sequence)
        for i in range(matched, len(sequence)):
            self.slots[tuple(sequence[: i + 1])] = int(fresh[i])

    @rule(sequence=SEQUENCE, lock=st.booleans())
    def match(self, sequence: list[int], lock: bool) -> None:
        n = self.cached_length(sequence)
        assert self.cache.match_length(ids(sequence)) == n
        match = self.cache.match_prefix(ids(sequence))
        assert match.slots.tolist() == [self.slots[tuple(sequence[: i + 1])] for i in range(n)]
        if lock:
            self.cache.lock(match.node)
            self.locks.append((match.node, sequence[:n]))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(node)

    @rule(count=st.integers(1, 10))
    def evict(self, count: int) -> None:
        evictable = self.cache.evictable_size
        freed = set(self.cache.evict(count).tolist())
        assert len(freed) >= min(count, evictable)
        self.slots = {sequence: slot for sequence, slot in self.slots.items() if slot not in freed}

    @invariant()
    def sizes_add_up(self) -> None:
        locked = {tuple(path[: i + 1]) for _, path in self.locks for i in range(len(path))}
        assert self.cache.protected_size == len(locked)
        assert self.cache.evictable_size == len(self.slots) - len(locked)
        assert locked <= self.slots.keys()


RadixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRadixCache = RadixMachine.TestCase
