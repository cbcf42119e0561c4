"""Sums and joins of tensors between ranks of one machine, through memory that all of them map.

Over sockets a sum of 32 rows costs a rank more in system calls and wake-ups than in adding; a layer has two.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 4 << 20
"""A rank's room for what it shares at a time; larger tensors go in pieces.  Pages never written take no memory."""
_LINE_BYTES = 64
_LOOKS = 50
"""Looks at a peer's counter before this thread lets others run between two looks."""
_HURRIED_S = 0.02
_PAUSE_S = 5e-5


class SharedMemory:
    """One rank's view of the memory.  All ranks must call the same methods in the same order, from one thread each.

    Every rank counts its calls in a line of its own, and has two rooms that it uses in turn: it fills one, counts
    on, and waits until the others have counted as far.  A room is free again when its owner comes back to it,
    because nobody counts a call before it has read all of the one before.  Counters and rooms are ordered by the
    processor as they are written, which x86 does.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        """`memory` has `num_bytes(size)` bytes, all zero before the first call of any rank."""
        self._rank = rank
        self._size = size
        whole = np.frombuffer(memory, dtype=np.uint8)
        lines = size * _LINE_BYTES
        self._counters = memoryview(memory)[:lines].cast("q")
        self._rooms = whole[lines:].reshape(2, size, PIECE_BYTES)
        self._calls = 0

    @staticmethod
    def num_bytes(size: int) -> int:
        """What `size` ranks need."""
        return size * (_LINE_BYTES + 2 * PIECE_BYTES)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous `tensor` by the sum over ranks, added in the order of ranks: the same bits on all."""
        import torch

        flat = tensor.view(-1)
        step = PIECE_BYTES // tensor.element_size()
        for start in range(0, len(flat), step):
            piece = flat[start : start + step]
            rooms = self._share(piece)
            torch.add(rooms[0], rooms[1], out=piece)
            for room in rooms[2:]:
                piece.add_(room)

    def all_gather(self, shard: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Joins `[rows, widths[rank]]` of every rank to `[rows, sum(widths)]`."""
        joined = shard.new_empty((shard.shape[0], sum(widths)))
        step = max(1, PIECE_BYTES // (max(widths) * shard.element_size()))
        for start in range(0, len(shard), step):
            rows = shard[start : start + step]
            rooms = self._share(rows.reshape(-1), [len(rows) * width for width in widths])
            end = 0
            for room, width in zip(rooms, widths, strict=True):
                joined[start : start + step, end : end + width] = room.view(len(rows), width)
                end += width
        return joined

    def _share(self, values: torch.Tensor, counts: list[int] | None = None) -> list[torch.Tensor]:
        """Every rank's values, of `values`' type: as many as this rank's, or `counts` of each."""
        import torch

        rooms = self._rooms[self._calls % 2]
        tensors = [
            torch.from_numpy(room[: count * values.element_size()]).view(values.dtype)
            for room, count in zip(rooms, counts or [len(values)] * self._size, strict=True)
        ]
        tensors[self._rank].copy_(values)
        self._calls += 1
        self._counters[self._rank * _LINE_BYTES // 8] = self._calls
        for rank in range(self._size):
            self._wait_for(rank * _LINE_BYTES // 8)
        return tensors

    def _wait_for(self, line: int) -> None:
        counters, calls = self._counters, self._calls
        for _ in range(_LOOKS):
            if counters[line] >= calls:
                return
        hurried_until = time.monotonic() + _HURRIED_S
        while counters[line] < calls:
            # Also lets this process's other threads have the interpreter.
            time.sleep(0 if time.monotonic() < hurried_until else _PAUSE_S)


def new_memory(size: int) -> tuple[mmap.mmap, int]:
    """Memory for `size` ranks, and its file descriptor, which is needed until the others have opened it.

    It has no name in any folder: nothing of it outlives the processes that map it.
    """
    descriptor = os.memfd_create("process-eras")
    os.ftruncate(descriptor, SharedMemory.num_bytes(size))
    return mmap.mmap(descriptor, 0), descriptor


def open_memory(pid: int, descriptor: int) -> mmap.mmap:
    """The memory that process `pid` has made.  OSError where this process may not open it."""
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), 0)
