"""The model's side of a scheduler process."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

from shared import trace
from shared.executor.forward_batch import ForwardResult
from shared.executor.rank import load_rank
from shared.messages import PortArgs
from shared.scheduling.batch import ScheduleBatch
from shared.server_args import ServerArgs


class TpModelWorker:
    """Holds this rank's runner: given a batch, one forward and one sample.

    Making one blocks until all ranks of the replica are there.
    """

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, gpu_id: int, tp_rank: int, dp_rank: int) -> None:
        overlap = not server_args.disable_overlap_schedule
        load = functools.partial(load_rank, server_args, port_args, tp_rank, dp_rank, overlap=overlap, gpu_id=gpu_id)
        if overlap:
            # Forwards will have a thread of their own, and OpenMP gives every thread that ever used it helpers of
            # its own.  With more of them than cores all would sleep at each barrier, where they else spin.
            with ThreadPoolExecutor(1) as loading:
                self.rank = loading.submit(load).result()
        else:
            self.rank = load()
        self._trace = trace.track()

    def forward_batch_generation(self, batch: ScheduleBatch) -> ForwardResult:
        """Runs `batch` to its end."""
        pending = self.rank.runner.launch(batch.forward)
        self._trace.lap("device launch")
        result = pending.wait()
        self._trace.lap("device wait")
        return result
