"""The prefix cache: a radix tree from token ids to token slots.

A node holds the slots of one run of tokens.  A live request locks the path to its last shared node; what
nobody locks can be evicted, least recently used leaf first.  "Recently" is a logical counter, never a clock,
so that the trees of all ranks stay the same.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from shared.messages import IntArray

_EMPTY: IntArray = np.zeros(0, dtype=np.int64)


class TreeNode:
    """One run of tokens.  `key` and `value` are int64 `[n]`: token ids and their slots."""

    __slots__ = ("children", "id", "in_heap", "key", "last_access", "lock_ref", "parent", "value")

    def __init__(self, id: int, parent: TreeNode | None, key: IntArray, value: IntArray) -> None:
        self.id = id
        self.parent = parent
        self.key = key
        self.value = value
        self.children: dict[int, TreeNode] = {}
        self.lock_ref = 0
        self.last_access = 0
        self.in_heap = False


class PrefixMatch(NamedTuple):
    """The longest cached prefix: its slots, int64 `[n]`, and the node it ends at."""

    slots: IntArray
    node: TreeNode


def _common_length(a: IntArray, b: IntArray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class RadixCache:
    """Owns every token slot in its tree until it evicts it.

    `evictable_size + protected_size` is the number of tokens in the tree; the protected ones lie on a locked
    path.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._next_id = 0
        self.reset()

    def reset(self) -> None:
        """Forgets everything.  The caller takes the slots back; no path may be locked."""
        self.root = self._new_node(None, _EMPTY, _EMPTY)
        self.root.lock_ref = 1
        self.evictable_size = 0
        self.protected_size = 0
        self._leaves: list[tuple[int, int, TreeNode]] = []

    def match_length(self, ids: IntArray) -> int:
        """How many leading tokens of `ids` are cached.  Changes nothing."""
        node, matched = self.root, 0
        while matched < len(ids):
            child = node.children.get(int(ids[matched]))
            if child is None:
                break
            common = _common_length(child.key, ids[matched:])
            matched += common
            if common < len(child.key):
                break
            node = child
        return matched

    def match_prefix(self, ids: IntArray) -> PrefixMatch:
        """The longest cached prefix of `ids`.  Splits a node where the match ends inside it."""
        node, parts = self._walk(ids)
        return PrefixMatch(np.concatenate(parts) if parts else _EMPTY, node)

    def insert(self, ids: IntArray, slots: IntArray) -> tuple[int, TreeNode]:
        """Puts `ids` with their `slots` (both int64 `[n]`) into the tree.

        Returns how many leading tokens were there already, and the node that `ids` ends at.  The tree keeps
        its own slots for those; of `slots` it takes over only the rest.
        """
        node, parts = self._walk(ids)
        matched = sum(len(part) for part in parts)
        if matched < len(ids):
            node = self._add_leaf(node, ids[matched:].copy(), slots[matched:].copy())
        return matched, node

    def lock(self, node: TreeNode) -> None:
        """Keeps the path from the root to `node`, itself included, from being evicted."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable_size -= len(node.key)
                self.protected_size += len(node.key)
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: TreeNode) -> None:
        """Undoes one `lock` of the same node."""
        while node.parent is not None:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_size += len(node.key)
                self.protected_size -= len(node.key)
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> IntArray:
        """Drops whole leaves, the longest unused first, until `count` slots are free or nothing is left.

        Returns the slots, int64 `[at least count, where there were as many]`.
        """
        freed: list[IntArray] = []
        total = 0
        while total < count and self._leaves:
            last_access, _, node = heapq.heappop(self._leaves)
            node.in_heap = False
            if node.children or node.lock_ref > 0 or node.parent is None:
                continue
            if node.last_access != last_access:
                self._offer(node)
                continue
            freed.append(self._remove_leaf(node))
            total += len(freed[-1])
        return np.concatenate(freed) if freed else _EMPTY

    def drop_tail(self, node: TreeNode, tokens: int) -> IntArray:
        """Removes up to `tokens` tokens from the end of the path to `node`, as far as nobody else uses them.

        For KV that must not be reused.  Returns the freed slots, int64 `[n]`.
        """
        freed: list[IntArray] = []
        while node.parent is not None and not node.children and node.lock_ref == 0 and len(node.key) <= tokens:
            parent = node.parent
            tokens -= len(node.key)
            freed.append(self._remove_leaf(node))
            node = parent
        return np.concatenate(freed) if freed else _EMPTY

    def _walk(self, ids: IntArray) -> tuple[TreeNode, list[IntArray]]:
        self._clock += 1
        node, matched = self.root, 0
        parts: list[IntArray] = []
        while matched < len(ids):
            child = node.children.get(int(ids[matched]))
            if child is None:
                break
            common = _common_length(child.key, ids[matched:])
            if common < len(child.key):
                child = self._split(child, common)
            child.last_access = self._clock
            parts.append(child.value)
            matched += common
            node = child
        return node, parts

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        """Cuts `node` after `length` tokens; returns the new upper half."""
        parent = node.parent
        assert parent is not None
        upper = self._new_node(parent, node.key[:length], node.value[:length])
        upper.lock_ref = node.lock_ref
        upper.last_access = node.last_access
        upper.children[int(node.key[length])] = node
        parent.children[int(node.key[0])] = upper
        node.parent = upper
        node.key = node.key[length:]
        node.value = node.value[length:]
        return upper

    def _add_leaf(self, parent: TreeNode, key: IntArray, value: IntArray) -> TreeNode:
        leaf = self._new_node(parent, key, value)
        leaf.last_access = self._clock
        parent.children[int(key[0])] = leaf
        self.evictable_size += len(key)
        self._offer(leaf)
        return leaf

    def _remove_leaf(self, node: TreeNode) -> IntArray:
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.key[0])]
        node.parent = None
        self.evictable_size -= len(node.key)
        self._offer(parent)
        return node.value

    def _offer(self, node: TreeNode) -> None:
        """Queues `node` for eviction if it can be evicted; an entry gone stale is mended when it is popped."""
        if node.in_heap or node.children or node.lock_ref > 0 or node.parent is None:
            return
        node.in_heap = True
        heapq.heappush(self._leaves, (node.last_access, node.id, node))

    def _new_node(self, parent: TreeNode | None, key: IntArray, value: IntArray) -> TreeNode:
        node = TreeNode(self._next_id, parent, key, value)
        self._next_id += 1
        return node
