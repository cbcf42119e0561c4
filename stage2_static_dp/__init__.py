"""Stage 2, May 2024 (#480, release 0.1.17): a controller deals requests out to a fixed number of replicas.

    stage2: main                     HTTP, TokenizerManager
    ├─ stage2: detokenizer           DetokenizerManager
    └─ stage2: controller            ControllerMulti and a DataParallelWorker thread per replica
       ├─ stage2: model DP0 TP0      ModelTpServer, reached over rpyc
       ├─ stage2: model DP0 TP1
       ├─ stage2: model DP1 TP0
       └─ stage2: model DP1 TP1

With DP 1 the controller is a ControllerSingle, which is stage 1's router under its new name; with TP 1 too,
the model lives in it.  Read `server.py`, `manager_single.py`, `tp_worker.py`, `manager_multi.py`,
`dp_worker.py`, in this order.
"""

from shared.server_args import ServerArgs


def model_title(server_args: ServerArgs, dp_rank: int, tp_rank: int) -> str:
    """The process title of a model process."""
    replica = f"DP{dp_rank} " if server_args.dp_size > 1 else ""
    return f"stage2: model {replica}TP{tp_rank}"
