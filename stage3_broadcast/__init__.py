"""Stage 3, July 2024 (#646, release 0.2.0): rank 0 lives in the controller and broadcasts what has arrived.

    stage3: main                           HTTP, TokenizerManager
    ├─ stage3: detokenizer                 DetokenizerManager
    └─ stage3: controller TP0              ControllerSingle with rank 0's ModelTpServer
       └─ stage3: model TP1                run_tp_server

With DP 2 a ControllerMulti comes in between, and each replica is a ControllerSingle with a queue from it:

    stage3: main
    ├─ stage3: detokenizer
    └─ stage3: controller                  ControllerMulti
       ├─ stage3: controller DP0 TP0       ControllerSingle
       │  └─ stage3: model DP0 TP1
       └─ stage3: controller DP1 TP0
          └─ stage3: model DP1 TP1

Read `server.py`, `controller_single.py`, `tp_worker.py`, `controller_multi.py`, in this order.
"""

from shared.server_args import ServerArgs


def replica_title(server_args: ServerArgs, dp_rank: int, tp_rank: int) -> str:
    """The process title of one rank: its replica's controller where it is rank 0."""
    role = "controller" if tp_rank == 0 else "model"
    replica = f"DP{dp_rank} " if server_args.dp_size > 1 else ""
    return f"stage3: {role} {replica}TP{tp_rank}"


def local_tp_ranks(server_args: ServerArgs) -> range:
    """The ranks of every replica that this node holds."""
    size = server_args.tp_size // server_args.nnodes
    return range(server_args.node_rank * size, (server_args.node_rank + 1) * size)
