"""Starts stage 2: `python -m stage2_static_dp.server`."""

from __future__ import annotations

import sys

from shared.launch.process_tree import ProcessNode
from shared.launch.server import run_server
from shared.launch.stage import Stage
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs
from shared.server_args import ServerArgs
from stage2_static_dp import model_title


def process_tree(server_args: ServerArgs) -> ProcessNode:
    """Main, detokenizer and controller, and below the controller a model process per replica and rank."""
    models = tuple(
        ProcessNode(f"model, replica {dp_rank} rank {tp_rank}", model_title(server_args, dp_rank, tp_rank))
        for dp_rank in range(server_args.dp_size)
        for tp_rank in range(server_args.tp_size)
    )
    if len(models) == 1:
        models = ()
    role = "controller" if models else "controller and model"
    return ProcessNode(
        "HTTP and tokenizer",
        "stage2: main",
        (
            ProcessNode("detokenizer", "stage2: detokenizer"),
            ProcessNode(role, "stage2: controller", models),
        ),
    )


def launch(server_args: ServerArgs, port_args: PortArgs, supervisor: Supervisor) -> None:
    """Starts the controller, which starts the model processes itself."""
    if server_args.dp_size == 1:
        from stage2_static_dp.manager_single import start_controller_process
    else:
        from stage2_static_dp.manager_multi import start_controller_process

    supervisor.start("controller", "stage2: controller", start_controller_process, (server_args, port_args))


STAGE = Stage(name="stage2", takes=frozenset({"dp", "dp_queue"}), process_tree=process_tree, launch=launch)

if __name__ == "__main__":
    sys.exit(run_server(STAGE))
