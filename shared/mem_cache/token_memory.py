"""One owner for every token slot: free list, request table and radix cache behind a handful of verbs.

At any moment each slot is in exactly one place: free, in the tree, or in the own part of one request's row.
"""

from __future__ import annotations

import numpy as np

from shared.mem_cache.radix_cache import RadixCache
from shared.mem_cache.slot_pools import ReqToTokenPool, TokenSlotAllocator
from shared.messages import IntArray
from shared.scheduling.req import Req


class TokenMemory:
    """The KV pool's bookkeeping of one rank.  `tree` is None with `--disable-radix-cache`."""

    def __init__(self, capacity: int, max_requests: int, width: int, *, use_tree: bool) -> None:
        self.slots = TokenSlotAllocator(capacity)
        self.rows = ReqToTokenPool(max_requests, width)
        self.table = self.rows.table
        self.max_requests = max_requests
        self.tree = RadixCache() if use_tree else None

    @property
    def capacity(self) -> int:
        return self.slots.capacity

    @property
    def evictable(self) -> int:
        return self.tree.evictable_size if self.tree else 0

    @property
    def protected(self) -> int:
        return self.tree.protected_size if self.tree else 0

    @property
    def available(self) -> int:
        """Slots that can be had now, by evicting where need be."""
        return self.slots.free_count + self.evictable

    def alloc(self, count: int) -> IntArray:
        """`count` slots, evicting for them.  Raises ValueError beyond `available`."""
        short = count - self.slots.free_count
        if short > 0 and self.tree:
            self.slots.free(self.tree.evict(short))
        return self.slots.alloc(count)

    def lock_prefix(self, req: Req) -> IntArray:
        """Locks the longest cached prefix of `req.fill_ids` that leaves at least one token to compute.

        Returns its slots, int64 `[n]`.
        """
        if self.tree is None:
            return np.zeros(0, dtype=np.int64)
        match = self.tree.match_prefix(req.fill_ids[:-1])
        self.tree.lock(match.node)
        req.last_node = match.node
        return match.slots

    def unlock_prefix(self, req: Req) -> None:
        """Undoes `lock_prefix` of a request that was not admitted after all."""
        if self.tree is not None and req.last_node is not None:
            self.tree.unlock(req.last_node)
        req.last_node = None

    def admit(self, req: Req, prefix: IntArray) -> None:
        """Gives `req` a row with its locked `prefix` and slots of its own for the rest of `fill_ids`."""
        n, p = len(req.fill_ids), len(prefix)
        own = self.alloc(n - p)
        req.row = self.rows.alloc()
        self.table[req.row, :p] = prefix
        self.table[req.row, p:n] = own
        req.prefix_len = req.protected_len = req.prefilled_len = p

    def share_prefilled(self, req: Req) -> None:
        """Puts what `req` is about to compute, `fill_ids[:prefilled_len]`, into the tree.

        From the next admission on others can build on it, even in the same forward, whose layers store all KV
        before they attend.
        """
        end = req.prefilled_len
        if self.tree is None or end <= req.protected_len:
            return
        matched, node = self.tree.insert(req.fill_ids[:end], self.table[req.row, :end].astype(np.int64))
        if matched > req.protected_len:  # all of it is cached; the one token computed anew stays private
            return
        assert req.last_node is not None
        self.tree.lock(node)
        self.tree.unlock(req.last_node)
        req.last_node = node
        req.protected_len = end

    def release(self, req: Req, allocated: int, *, keep: bool = True) -> None:
        """Takes back the row of `req`, whose first `allocated` entries are slots.

        What has been computed goes into the tree, except with `keep` False (its KV is not to be trusted).
        """
        row = self.table[req.row, :allocated].astype(np.int64)
        protected = req.protected_len
        if self.tree is None:
            self.slots.free(row)
        elif keep:
            assert req.last_node is not None
            committed = req.committed_len
            ids = np.concatenate([req.prompt_ids, np.array(req.output_ids, dtype=np.int64)])[:committed]
            matched, _ = self.tree.insert(ids, row[:committed])
            self.slots.free(row[protected:matched])
            self.slots.free(row[committed:])
            self.tree.unlock(req.last_node)
        else:
            assert req.last_node is not None
            self.slots.free(row[protected:])
            self.tree.unlock(req.last_node)
            self.slots.free(self.tree.drop_tail(req.last_node, protected - req.prefix_len))
        self.rows.free(req.row)
        req.reset_admission()

    def flush(self) -> None:
        """Forgets all prefixes.  Only with no request admitted."""
        if self.tree:
            self.tree.reset()
        self.slots.clear()

    def leak(self) -> str | None:
        """With no request admitted: what is missing, or None when the pool is whole."""
        free, evictable, protected = self.slots.free_count, self.evictable, self.protected
        if free + evictable == self.capacity and protected == 0 and self.rows.free_count == self.max_requests:
            return None
        return (
            f"{free} free + {evictable} evictable + {protected} locked of {self.capacity} token slots, "
            f"{self.rows.free_count} of {self.max_requests} request slots free"
        )
