"""The order of the waiting queue.

Only the `WINDOW` oldest requests are ordered, so that a step costs the same with 50 requests waiting as with
5,000 (case C57), and one that has been overtaken for `MAX_OVERTAKEN_ROUNDS` admissions makes the round
first come, first served, so that none waits without end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from shared.mem_cache.radix_cache import RadixCache, TreeNode
from shared.scheduling.req import Req

WINDOW = 128
MAX_OVERTAKEN_ROUNDS = 64


class SchedulePolicy:
    """Orders requests for admission: `lpm`, `fcfs`, `dfs-weight` or `random` (seeded)."""

    def __init__(self, name: str, tree: RadixCache | None, seed: int) -> None:
        self._tree = tree
        self._random = random.Random(seed)
        orders: dict[str, Callable[[list[Req]], list[Req]]] = {
            "lpm": self._longest_prefix_match,
            "dfs-weight": self._dfs_weight,
            "random": self._shuffled,
            "fcfs": lambda reqs: reqs,
        }
        self._order = orders["fcfs" if tree is None and name in ("lpm", "dfs-weight") else name]

    def order(self, waiting: Sequence[Req], round: int) -> list[Req]:
        """The requests to try now, best first: a permutation of the oldest ones of `waiting`."""
        window = list(waiting[:WINDOW])
        if len(window) < 2 or round - window[0].arrival_round > MAX_OVERTAKEN_ROUNDS:
            return window
        return self._order(window)

    def _longest_prefix_match(self, reqs: list[Req]) -> list[Req]:
        assert self._tree is not None
        lengths = {id(req): self._tree.match_length(req.prompt_ids) for req in reqs}
        return sorted(reqs, key=lambda req: -lengths[id(req)])

    def _dfs_weight(self, reqs: list[Req]) -> list[Req]:
        """Subtree by subtree, the one that most requests hang on first, so that its path stays cached."""
        assert self._tree is not None
        at: dict[int, list[Req]] = {}
        weight: dict[int, int] = {}
        ends = [self._tree.match_prefix(req.prompt_ids).node for req in reqs]  # all splits happen here
        for req, end in zip(reqs, ends, strict=True):
            at.setdefault(end.id, []).append(req)
            node: TreeNode | None = end
            while node is not None:
                weight[node.id] = weight.get(node.id, 0) + 1
                node = node.parent
        ordered: list[Req] = []
        stack = [self._tree.root]
        while stack:
            top = stack.pop()
            ordered.extend(at.get(top.id, ()))
            heavy = [child for child in top.children.values() if child.id in weight]
            stack.extend(sorted(heavy, key=lambda child: (weight[child.id], -child.id)))
        return ordered

    def _shuffled(self, reqs: list[Req]) -> list[Req]:
        self._random.shuffle(reqs)
        return reqs
