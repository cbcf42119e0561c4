"""The ranks of one tensor-parallel group and what they say to each other.

torch is imported by the first call that needs it: a group of one rank (and so a simulated rank alone) never
does.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import platform
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from shared import trace
from shared.messages import IntArray
from shared.parallel.shared_memory import SharedMemory, new_memory, open_memory

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

PROCESS_GROUP_TIMEOUT = timedelta(days=3650)
"""How long a rank waits for its peers.  Neither an idle server nor a slow peer is a dead one; a peer that
is gone closes its connections, which ends the wait at once."""


class TpGroup:
    """One rank's view of its group.  All ranks must call every collective, in the same order per group.

    Three process groups, so that threads never meet on one: `device_group` carries tensors of the forward,
    `cpu_group` control messages of the scheduler, `check_group` the hashes of `--check-determinism`.  All
    three are None in a group of one rank, where every call returns at once.  Where there is `shared_memory`,
    tensors of the forward go through it instead.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device_group: ProcessGroup | None = None,
        cpu_group: ProcessGroup | None = None,
        check_group: ProcessGroup | None = None,
        shared_memory: SharedMemory | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device_group = device_group
        self.cpu_group = cpu_group
        self.check_group = check_group
        self.shared_memory = shared_memory
        self._trace = trace.track()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place, the same bits on every rank.  `tensor` is contiguous."""
        if self.shared_memory is not None:
            self.shared_memory.all_reduce(tensor)
        elif self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def all_gather(self, shard: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Joins `[rows, widths[rank]]` of every rank to `[rows, sum(widths)]`; the widths may differ."""
        if self.size == 1:
            return shard
        if self.shared_memory is not None:
            return self.shared_memory.all_gather(shard, widths)
        import torch
        import torch.distributed as dist

        rows, widest = shard.shape[0], max(widths)
        if shard.shape[1] < widest:
            shard = torch.nn.functional.pad(shard, (0, widest - shard.shape[1]))
        parts = shard.new_empty((self.size, rows, widest))
        dist.all_gather(list(parts.unbind()), shard.contiguous(), group=self.device_group)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast_pyobj(self, data: list[Any]) -> list[Any]:
        """Rank 0's list on every rank; what the others pass in is ignored.

        The length of the pickle goes first, then its bytes; for an empty list only the length, 0.
        """
        if self.size == 1:
            return data
        import torch
        import torch.distributed as dist

        buffer = io.BytesIO()
        if self.rank == 0 and data:
            pickle.dump(data, buffer, protocol=pickle.HIGHEST_PROTOCOL)
            self._trace.lap("serialize", buffer.tell())
        length = torch.tensor([buffer.tell()], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self.cpu_group)
        num_bytes = int(length)
        if num_bytes == 0:
            self._trace.lap("broadcast")
            return []
        view = np.frombuffer(buffer.getbuffer(), dtype=np.uint8) if self.rank == 0 else np.empty(num_bytes, np.uint8)
        dist.broadcast(torch.from_numpy(view), src=0, group=self.cpu_group)
        self._trace.lap_in("broadcast", data, num_bytes)
        if self.rank == 0:
            return data
        received: list[Any] = pickle.loads(view.data)
        self._trace.lap_in("deserialize", received)
        return received

    def agree_min(self, value: int) -> int:
        """The smallest `value` of any rank, on every rank."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.cpu_group)
        return int(tensor)

    def gather_for_check(self, values: IntArray) -> IntArray:
        """`values` (`[n]`, the same n everywhere) of every rank as `[size, n]`, over `check_group`."""
        if self.size == 1:
            return values[None]
        import torch
        import torch.distributed as dist

        gathered = np.empty((self.size, len(values)), dtype=np.int64)
        rows = list(torch.from_numpy(gathered).unbind())
        dist.all_gather(rows, torch.from_numpy(values), group=self.check_group)
        return gathered


def init_tp_group(rank: int, size: int, init_method: str, *, device: str = "cpu", loopback: bool = True) -> TpGroup:
    """Joins the group of `size` ranks that meet at `init_method`; blocks until all of them are there.

    `init_method` is `file://` and a path in the launch's private run directory on one machine, or
    `tcp://host:port` on several, which must then pass `loopback=False`.  Nothing is joined where `size` is 1.
    """
    if size == 1:
        return TpGroup(rank, size)
    import torch.distributed as dist

    if loopback:
        # Else gloo listens on the address of the host's name, where others can reach it.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=PROCESS_GROUP_TIMEOUT)
    device_backend = "nccl" if device == "cuda" else "gloo"
    group = TpGroup(
        rank,
        size,
        device_group=dist.new_group(backend=device_backend, timeout=PROCESS_GROUP_TIMEOUT),
        cpu_group=dist.new_group(backend="gloo", timeout=PROCESS_GROUP_TIMEOUT),
        check_group=dist.new_group(backend="gloo", timeout=PROCESS_GROUP_TIMEOUT),
    )
    if device == "cpu" and loopback and sys.platform == "linux" and platform.machine() == "x86_64":
        group.shared_memory = _share_memory(group)
    return group


def _share_memory(group: TpGroup) -> SharedMemory | None:
    """Memory that all ranks of `group` map, None where one of them may not open that of rank 0."""
    memory = None
    if group.rank == 0:
        memory, descriptor = new_memory(group.size)
        group.broadcast_pyobj([(os.getpid(), descriptor)])
    else:
        (where,) = group.broadcast_pyobj([])
        with contextlib.suppress(OSError):
            memory = open_memory(*where)
    all_have_it = group.agree_min(memory is not None)
    if group.rank == 0:
        os.close(descriptor)
    return SharedMemory(memory, group.rank, group.size) if all_have_it and memory is not None else None
