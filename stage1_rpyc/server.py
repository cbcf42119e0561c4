"""Starts stage 1: `python -m stage1_rpyc.server`."""

from __future__ import annotations

import sys

from shared.launch.process_tree import ProcessNode
from shared.launch.server import run_server
from shared.launch.stage import Stage
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs
from shared.server_args import ServerArgs


def process_tree(server_args: ServerArgs) -> ProcessNode:
    """Main, detokenizer and router, and below the router one model process per rank when there are several."""
    ranks = range(server_args.tp_size) if server_args.tp_size > 1 else range(0)
    models = tuple(ProcessNode(f"model rank {rank}", f"stage1: model TP{rank}") for rank in ranks)
    return ProcessNode(
        "HTTP and tokenizer",
        "stage1: main",
        (
            ProcessNode("detokenizer", "stage1: detokenizer"),
            ProcessNode("router", "stage1: router", models),
        ),
    )


def launch(server_args: ServerArgs, port_args: PortArgs, supervisor: Supervisor) -> None:
    """Starts the router, which starts the model processes itself."""
    from stage1_rpyc.router import start_router_process

    supervisor.start("router", "stage1: router", start_router_process, (server_args, port_args))


STAGE = Stage(name="stage1", takes=frozenset(), process_tree=process_tree, launch=launch)

if __name__ == "__main__":
    sys.exit(run_server(STAGE))
