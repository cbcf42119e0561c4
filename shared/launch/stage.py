"""What a stage is to the launcher, and how its processes are started; HTTP is elsewhere.

A stage's HTTP server and, in stage 4, its offline engine start their processes here alike.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shared import trace
from shared.frontend.limits import Limits
from shared.launch.process_tree import ProcessNode
from shared.launch.run_dir import RunDir
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs
from shared.server_args import ServerArgs
from shared.weights.model_config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """One process model.

    `takes` are the groups of flags it has beyond the common ones.  `process_tree` says what would start; its
    root is the main process.  `launch` starts the middle corner under the given supervisor and does not wait.
    """

    name: str
    takes: frozenset[str]
    process_tree: Callable[[ServerArgs], ProcessNode]
    launch: Callable[[ServerArgs, PortArgs, Supervisor], None]


@dataclass(frozen=True)
class LaunchedProcesses:
    """A stage that is ready."""

    supervisor: Supervisor
    run_dir: RunDir
    port_args: PortArgs
    limits: Limits

    def stop(self, grace: float = 1.0) -> None:
        """Ends all processes (SIGKILL after `grace` seconds), removes the run directory, completes the trace."""
        self.supervisor.stop(grace)
        self.run_dir.remove()
        folder = trace.stop()
        if folder is not None:
            from shared.trace.merge import merge

            try:
                merge(folder)
            except OSError as error:  # someone removed the folder, or the disk is full
                logger.warning("there is no whole trace: %s", error)


class BadFlag(Exception):
    """A flag that only the model or a folder shows to be wrong; the message is one line with the fix."""


def resolve_model(server_args: ServerArgs) -> ServerArgs:
    """Finds and prepares the model (a progress bar shows), and checks the flags that depend on it.

    Returns the settings with `model_path` the folder, `served_model_name` the name that was asked for and the
    backends chosen.
    Raises `BadFlag`.
    """
    from shared.kernels.choice import resolve_backends
    from shared.parallel.partition import allowed_tp_sizes
    from shared.weights.prepare import prepare_model

    folder = prepare_model(server_args.model_path)
    config = ModelConfig.from_folder(folder)
    allowed = allowed_tp_sizes(config, config.num_attention_heads)
    if server_args.tp_size not in allowed:
        sizes = ", ".join(map(str, allowed))
        raise BadFlag(
            f"--tp-size {server_args.tp_size} cannot split {server_args.model_name} "
            f"(it has {config.num_key_value_heads} KV heads); give one of {sizes}"
        )
    try:
        server_args = resolve_backends(server_args, config.head_dim)
    except ValueError as problem:
        raise BadFlag(str(problem)) from None
    return dataclasses.replace(server_args, model_path=str(folder), served_model_name=server_args.model_name)


def start_trace(stage: Stage, server_args: ServerArgs) -> None:
    """Makes this process and those that it will start record into `--trace-dir`.  Raises `BadFlag`."""
    if server_args.trace_dir is None:
        return
    try:
        folder = trace.prepare_folder(server_args.trace_dir)
    except trace.TraceFolderUnusable as problem:
        raise BadFlag(str(problem)) from None
    trace.start(folder, stage.process_tree(server_args).title)


def launch_processes(
    stage: Stage, server_args: ServerArgs, meanwhile: Callable[[], None] | None = None
) -> LaunchedProcesses:
    """Starts the detokenizer (on node 0) and the stage's middle corner and waits until all are ready.

    `server_args` comes from `resolve_model`; `meanwhile` is called while they start.  Call it from a thread
    that lives as long as the process.  Raises `ChildFailed`, with nothing left behind.
    """
    from shared.detokenizer import run_detokenizer_process

    run_dir = RunDir()
    supervisor = Supervisor(at_exit=run_dir.remove)
    port_args = run_dir.port_args()
    try:
        if server_args.node_rank == 0:
            supervisor.start(
                "detokenizer", f"{stage.name}: detokenizer", run_detokenizer_process, (server_args, port_args)
            )
        stage.launch(server_args, port_args, supervisor)
        if meanwhile is not None:
            meanwhile()
        limits = _limits(server_args, supervisor.wait_ready().values())
    except BaseException:
        supervisor.stop(grace=1.0)
        run_dir.remove()
        raise
    return LaunchedProcesses(supervisor, run_dir, port_args, limits)


def _limits(server_args: ServerArgs, payloads: Iterable[dict[str, Any]]) -> Limits:
    """What every replica can take, from the ready messages of the middle corner."""
    replicas = [payload for payload in payloads if "max_total_num_tokens" in payload]
    return Limits(
        context_length=min(payload["context_length"] for payload in replicas),
        max_total_num_tokens=min(payload["max_total_num_tokens"] for payload in replicas),
        max_running_requests=min(payload["max_running_requests"] for payload in replicas),
        vocab_size=ModelConfig.from_folder(server_args.model_path).vocab_size,
        dp_size=server_args.dp_size,
    )
