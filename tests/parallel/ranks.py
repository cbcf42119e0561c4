"""Runs a function on every rank of a tensor-parallel group, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shared.parallel.tp_group import TpGroup, init_tp_group


def run_ranks(size: int, work: Callable[..., Any], meeting_place: Path, *args: Any) -> list[Any]:
    """`work(tp_group, *args)` of every rank, in rank order.

    `work` must be importable.  Raises EOFError where a rank fails; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    init_method = f"file://{meeting_place}"
    processes = [
        context.Process(target=_run_rank, args=(rank, size, init_method, writer, work, args), daemon=True)
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()
    try:
        return [reader.recv() for reader, _ in pipes]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()


def _run_rank(
    rank: int,
    size: int,
    init_method: str,
    writer: Connection,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    tp_group: TpGroup = init_tp_group(rank, size, init_method)
    writer.send(work(tp_group, *args))
