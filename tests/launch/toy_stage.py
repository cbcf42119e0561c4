"""A stage whose middle corner answers nothing.

    python -m tests.launch.toy_stage MARKER (works|starts) FLAGS ...

It makes the file MARKER when it starts; with "starts" it is never ready.  Its model is tiny-random.
"""

from __future__ import annotations

import functools
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from shared.launch import ProcessNode, Stage, Supervisor, run_server
from shared.messages import PortArgs
from shared.server_args import ServerArgs


def run_middle(marker: str, how: str, pipe_writer: Connection) -> None:
    Path(marker).touch()
    limits = {"max_total_num_tokens": 100, "max_running_requests": 4, "context_length": 64}
    if how == "works":
        pipe_writer.send({"status": "ready", **limits})
    time.sleep(600)


def process_tree(server_args: ServerArgs) -> ProcessNode:
    children = (ProcessNode("text", "toy: detokenizer"), ProcessNode("model", "toy: middle"))
    return ProcessNode("HTTP", "toy: main", children)


def launch(marker: str, how: str, _: ServerArgs, port_args: PortArgs, supervisor: Supervisor) -> None:
    supervisor.start("middle", "toy: middle", run_middle, (marker, how))


if __name__ == "__main__":
    marker, how, *flags = sys.argv[1:]
    stage = Stage("toy", frozenset(), process_tree, functools.partial(launch, marker, how))
    sys.exit(run_server(stage, ["--model-path", "tiny-random", *flags]))
