"""The free lists of the two pools: token slots of the KV cache, and rows of the request table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.messages import IntArray


class TokenSlotAllocator:
    """Hands out the token slots `0 … capacity - 1`, last freed first.

    From a pool that is not fragmented, a request alone gets consecutive ones, which need no gathering.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Takes every slot back."""
        self._stack: IntArray = np.arange(self.capacity - 1, -1, -1, dtype=np.int64)
        self.free_count = self.capacity

    def alloc(self, count: int) -> IntArray:
        """`count` free slots, int64 `[count]`.  Raises ValueError where there are fewer."""
        if count > self.free_count:
            raise ValueError(f"{count} token slots wanted, {self.free_count} free")
        self.free_count -= count
        taken: IntArray = self._stack[self.free_count : self.free_count + count][::-1].copy()
        return taken

    def free(self, slots: IntArray) -> None:
        """Gives `slots` back.  Raises ValueError when that is more than were taken."""
        end = self.free_count + len(slots)
        if end > self.capacity:
            raise ValueError("more token slots given back than were handed out")
        self._stack[self.free_count : end] = slots[::-1]
        self.free_count = end


class ReqToTokenPool:
    """The table from a request and a position to a token slot.

    `table` is int32 `[rows, width]`; a request owns one row while it is admitted.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.table: npt.NDArray[np.int32] = np.zeros((rows, width), dtype=np.int32)
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        """One free row.  Raises IndexError where there is none."""
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.append(row)
