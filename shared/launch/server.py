"""The main process of every stage: flags, port, model, processes, HTTP, and the way out.

Exit status: 0 after Ctrl-C or SIGTERM (also during the start) and after `--print-process-tree`, 1 when the
start failed or a child died, 2 for a bad flag.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import NoReturn

from setproctitle import setproctitle

from shared.launch.http_socket import PortUnavailable, bind_http_socket
from shared.launch.logs import set_up_logging
from shared.launch.process_tree import ProcessNode, format_tree, with_pids
from shared.launch.stage import BadFlag, Stage, launch_processes, resolve_model, start_trace
from shared.launch.stop_signal import StopRequested, StopSignal
from shared.launch.supervisor import ChildFailed
from shared.server_args import ServerArgs, parse_server_args
from shared.weights.errors import ModelPreparationError
from shared.weights.tokenizer import import_transformers


def run_server(stage: Stage, argv: list[str] | None = None) -> int:
    """Serves `stage` with the flags in `argv` (default: the command line's) and returns the exit status."""
    began = time.monotonic()
    server_args = parse_server_args(stage.name, stage.takes, argv)
    tree = stage.process_tree(server_args)
    if server_args.print_process_tree:
        print(format_tree(tree))
        return 0
    stop = StopSignal()
    setproctitle(tree.title)
    set_up_logging(tree.title, server_args.log_level)
    try:
        with contextlib.ExitStack() as resources, stop:
            http_socket = None
            if server_args.node_rank == 0:
                http_socket = resources.enter_context(bind_http_socket(server_args.host, server_args.port))
            start_trace(stage, server_args)
            server_args = resolve_model(server_args)
            processes = launch_processes(stage, server_args, meanwhile=_import_http_server)
            resources.callback(processes.stop)  # called when `stop` has been left
            from shared.launch.http_server import serve_http  # not above: children import this module

            if http_socket is None:
                _wait_for_the_end(with_pids(tree), server_args)
            return serve_http(server_args, processes, with_pids(tree), http_socket, began, stop.hand_over)
    except StopRequested:
        return 0
    except ChildFailed as failure:
        return 0 if stop.requested and failure.exitcode == 0 else 1  # the supervisor has logged it
    except BadFlag as problem:
        print(f"{stage.name}: {problem}", file=sys.stderr)
        return 2
    except (PortUnavailable, ModelPreparationError) as problem:
        print(f"{stage.name}: {problem}", file=sys.stderr)
        return 1


def _wait_for_the_end(tree: ProcessNode, server_args: ServerArgs) -> NoReturn:
    """A node other than 0 only has ranks.  Their death ends this process (when node 0 is gone, they lose
    their connections), and so does a signal.
    """
    print(f"\n{format_tree(tree)}\n\nnode {server_args.node_rank} is ready; node 0 serves", flush=True)
    while True:
        threading.Event().wait()


def _import_http_server() -> None:
    import shared.launch.http_server  # noqa: F401

    import_transformers()
