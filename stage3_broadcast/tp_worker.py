"""One rank's model and scheduler, how ranks other than 0 run, and the broadcast that keeps them all in step."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from shared import trace
from shared.executor.engine_step import ERA_DECODE_STEPS, EngineStep
from shared.executor.rank import load_rank
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs, SchedulerInput, SchedulerOutput
from shared.server_args import ServerArgs
from stage3_broadcast import local_tp_ranks, replica_title

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class ModelTpServer:
    """One rank: its scheduler and its model.  All ranks of a replica are stepped with the same requests."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, dp_rank: int, tp_rank: int) -> None:
        rank = load_rank(server_args, port_args, tp_rank, dp_rank)
        steps = server_args.num_continuous_decode_steps or ERA_DECODE_STEPS
        self._engine = EngineStep(rank, decode_steps=steps, cut_on_stream=True)
        self.tp_cpu_group = rank.tp_group.cpu_group
        self.ready_message = rank.ready_message

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return self._engine.idle

    def exposed_step(self, recv_reqs: list[SchedulerInput]) -> list[SchedulerOutput]:
        """One step; the name is all that is left of rpyc."""
        return self._engine.step(recv_reqs)


def run_tp_server(
    server_args: ServerArgs, port_args: PortArgs, dp_rank: int, tp_rank: int, pipe_writer: Connection
) -> None:
    """A rank's entry, other than rank 0: does what rank 0 does and throws the outputs away."""
    model_server = ModelTpServer(server_args, port_args, dp_rank, tp_rank)
    group, codec = model_server.tp_cpu_group, server_args.broadcast_codec
    assert group is not None, "a rank other than 0 has peers"
    pipe_writer.send(model_server.ready_message)
    track = trace.track()
    while True:
        recv_reqs = broadcast_recv_input([], tp_rank, group, codec)
        model_server.exposed_step(recv_reqs)
        track.end_step()


def launch_tp_servers(server_args: ServerArgs, port_args: PortArgs, dp_rank: int, supervisor: Supervisor) -> None:
    """Starts this node's ranks of a replica, but for rank 0, which its controller has in its own process."""
    for tp_rank in local_tp_ranks(server_args):
        if tp_rank > 0:
            title = replica_title(server_args, dp_rank, tp_rank)
            supervisor.start(title, title, run_tp_server, (server_args, port_args, dp_rank, tp_rank))


def broadcast_recv_input(
    data: list[SchedulerInput], rank: int, dist_group: ProcessGroup, codec: str
) -> list[SchedulerInput]:
    """Rank 0's `data` on every rank; what the others pass in is ignored.

    First the length of the pickle as one int64, then its bytes as uint8.  Where nothing has arrived there is
    only a 0, which keeps idle ranks in step.  `codec` is how bytes become a tensor: "list" goes through a
    Python list of ints, as the release did, "buffer" looks at the bytes where they are.
    """
    import torch
    import torch.distributed as dist

    payload = bytearray(pickle.dumps(data, pickle.HIGHEST_PROTOCOL)) if rank == 0 and data else bytearray()
    length = torch.tensor([len(payload)], dtype=torch.int64)
    track = trace.track()
    track.lap("serialize", len(payload))
    dist.broadcast(length, src=0, group=dist_group)
    num_bytes = int(length)
    if num_bytes == 0:
        track.lap("broadcast")
        return []
    if rank == 0:
        dist.broadcast(_to_tensor(payload, codec), src=0, group=dist_group)
        track.lap_in("broadcast", data, num_bytes)
        return data
    received = torch.empty(num_bytes, dtype=torch.uint8)
    dist.broadcast(received, src=0, group=dist_group)
    track.lap("broadcast", num_bytes)
    recv_reqs: list[SchedulerInput] = pickle.loads(_to_bytes(received, codec))
    track.lap_in("deserialize", recv_reqs)
    return recv_reqs


def _to_tensor(payload: bytearray, codec: str) -> torch.Tensor:
    """`[num_bytes]` uint8, CPU."""
    import torch

    if codec == "list":
        return torch.ByteTensor(list(payload))
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8))


def _to_bytes(tensor: torch.Tensor, codec: str) -> bytes | memoryview:
    if codec == "list":
        return bytes(tensor.tolist())
    return tensor.numpy().data
