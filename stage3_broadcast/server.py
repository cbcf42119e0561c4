"""Starts stage 3: `python -m stage3_broadcast.server`."""

from __future__ import annotations

import sys

from shared.launch.process_tree import ProcessNode
from shared.launch.server import run_server
from shared.launch.stage import Stage
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs
from shared.server_args import ServerArgs
from stage3_broadcast import local_tp_ranks, replica_title

MULTI_TITLE = "stage3: controller"


def process_tree(server_args: ServerArgs) -> ProcessNode:
    """On node 0 the triangle, with rank 0 in the controller; on other nodes the main process and its ranks."""
    replicas = range(server_args.dp_size)
    if server_args.node_rank > 0:
        models = [model for dp_rank in replicas for model in _models(server_args, dp_rank)]
        return ProcessNode(f"ranks of node {server_args.node_rank}", "stage3: main", tuple(models))
    controllers = tuple(
        ProcessNode(
            f"controller and model, replica {dp_rank} rank 0",
            replica_title(server_args, dp_rank, 0),
            _models(server_args, dp_rank),
        )
        for dp_rank in replicas
    )
    if server_args.dp_size > 1:
        controllers = (ProcessNode("controller of the replicas", MULTI_TITLE, controllers),)
    detokenizer = ProcessNode("detokenizer", "stage3: detokenizer")
    return ProcessNode("HTTP and tokenizer", "stage3: main", (detokenizer, *controllers))


def _models(server_args: ServerArgs, dp_rank: int) -> tuple[ProcessNode, ...]:
    return tuple(
        ProcessNode(f"model, replica {dp_rank} rank {tp_rank}", replica_title(server_args, dp_rank, tp_rank))
        for tp_rank in local_tp_ranks(server_args)
        if tp_rank > 0
    )


def launch(server_args: ServerArgs, port_args: PortArgs, supervisor: Supervisor) -> None:
    """Starts the controller, which starts what is below it; on other nodes than 0 the ranks themselves."""
    if server_args.node_rank > 0:
        from stage3_broadcast.tp_worker import launch_tp_servers

        for dp_rank in range(server_args.dp_size):
            launch_tp_servers(server_args, port_args, dp_rank, supervisor)
    elif server_args.dp_size > 1:
        from stage3_broadcast.controller_multi import start_controller_multi_process

        args = (server_args, port_args)
        supervisor.start("controller", MULTI_TITLE, start_controller_multi_process, args)
    else:
        from stage3_broadcast.controller_single import start_controller_process

        args = (server_args, port_args)
        supervisor.start("controller", replica_title(server_args, 0, 0), start_controller_process, args)


STAGE = Stage(
    name="stage3",
    takes=frozenset({"dp", "broadcast_codec", "nnodes"}),
    process_tree=process_tree,
    launch=launch,
)

if __name__ == "__main__":
    sys.exit(run_server(STAGE))
