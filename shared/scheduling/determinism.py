"""`--check-determinism`: every rank shows the others a hash of every step, and the first difference ends the server.

Each rank schedules on its own; that works only while all of them decide the same.  The check runs before the
forward, so that ranks that have come apart do not wait for each other in different collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from shared.executor.forward_batch import ForwardResult
from shared.messages import IntArray
from shared.scheduling.batch import ScheduleBatch

FIELDS = ("step", "mode", "request ids", "lengths", "cache slots", "sampled tokens")
IDLE = -1

GatherForCheck = Callable[[IntArray], IntArray]


class DeterminismError(RuntimeError):
    """Two ranks decided differently: says at which step, in which field, and which ranks."""


class DeterminismChecker:
    """Compares steps across the ranks of one replica.

    `gather(values)` returns every rank's `values`, int64 `[n]`, as `[ranks, n]`.
    """

    def __init__(self, gather: GatherForCheck) -> None:
        self._gather = gather
        self._tokens = 0

    def check_batch(self, batch: ScheduleBatch | None, step: int) -> None:
        """Compares what is about to run (None: nothing) and the tokens sampled since the last call.

        Raises `DeterminismError` on every rank where any rank differs.
        """
        mine = np.array([step, IDLE, 0, 0, 0, self._tokens], dtype=np.int64)
        if batch is not None:
            forward = batch.forward
            mine[1] = forward.mode
            mine[2] = _digest("\n".join(forward.rids).encode())
            mine[3] = _digest(forward.seq_lens.tobytes(), forward.extend_lens.tobytes())
            mine[4] = _digest(forward.out_cache_loc.tobytes())
        self._tokens = 0
        for field, column in zip(FIELDS, self._gather(mine).T, strict=True):
            odd = np.flatnonzero(column != column[0])
            if len(odd):
                ranks = ", ".join(str(rank) for rank in odd)
                raise DeterminismError(f"step {step}: {field} of rank {ranks} differ from those of rank 0")

    def add_result(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        """Keeps the sampled tokens of `batch` for the next comparison."""
        tokens = result.next_token_ids[batch.forward.emits]
        self._tokens = _digest(self._tokens.to_bytes(8, "little", signed=True), tokens.tobytes())


def _digest(*parts: bytes) -> int:
    hash = hashlib.blake2b(digest_size=8)
    for part in parts:
        hash.update(part)
    return int.from_bytes(hash.digest(), "little", signed=True)
