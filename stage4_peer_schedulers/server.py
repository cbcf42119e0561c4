"""Starts stage 4: `python -m stage4_peer_schedulers.server`."""

from __future__ import annotations

import sys

from shared.launch import ProcessNode, Stage, Supervisor, run_server
from shared.messages import PortArgs
from shared.server_args import ServerArgs

CONTROLLER_TITLE = "stage4: data parallel controller"


def process_tree(server_args: ServerArgs) -> ProcessNode:
    """Main, detokenizer, one scheduler per rank; with several replicas the schedulers are the controller's.

    On a node other than 0, only main and the schedulers.
    """
    has_replicas = server_args.dp_size > 1
    ranks = [
        (dp_rank if has_replicas else None, tp_rank)
        for dp_rank in range(server_args.dp_size)
        for tp_rank in local_tp_ranks(server_args)
    ]
    schedulers = tuple(
        ProcessNode("scheduler and model", scheduler_title(tp_rank, dp_rank)) for dp_rank, tp_rank in ranks
    )
    if server_args.node_rank > 0:
        return ProcessNode(f"ranks of node {server_args.node_rank}", "stage4: main", schedulers)
    detokenizer = ProcessNode("detokenizer", "stage4: detokenizer")
    if has_replicas:
        schedulers = (ProcessNode("data parallel controller", CONTROLLER_TITLE, schedulers),)
    return ProcessNode("HTTP and tokenizer", "stage4: main", (detokenizer, *schedulers))


def scheduler_title(tp_rank: int, dp_rank: int | None) -> str:
    """`dp_rank` is None without data parallelism."""
    replica = "" if dp_rank is None else f"DP{dp_rank} "
    return f"stage4: scheduler {replica}TP{tp_rank}"


def local_tp_ranks(server_args: ServerArgs) -> range:
    """The tensor-parallel ranks that run on this node."""
    per_node = server_args.tp_size // server_args.nnodes
    return range(server_args.node_rank * per_node, (server_args.node_rank + 1) * per_node)


def launch(server_args: ServerArgs, port_args: PortArgs, supervisor: Supervisor) -> None:
    """Starts the middle corner, as the offline engine does."""
    from stage4_peer_schedulers.engine import _launch_subprocesses

    _launch_subprocesses(server_args, port_args, supervisor)


STAGE = Stage(name="stage4", takes=frozenset({"dp", "overlap", "nnodes"}), process_tree=process_tree, launch=launch)

if __name__ == "__main__":
    sys.exit(run_server(STAGE))
