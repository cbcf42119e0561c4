"""Overlap: the model runs on a thread of its own while the scheduler looks at the batch before."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import numpy as np

from shared import trace
from shared.executor.forward_batch import ForwardResult, ForwardRunner, PendingForward
from shared.messages import IntArray
from shared.scheduling.batch import ScheduleBatch
from stage4_peer_schedulers.tp_worker import TpModelWorker


class FutureTokenMap:
    """Tokens by the cell they were promised in, kept where the runner has its tokens: an input id of `-k` stands
    for cell `k`, and nothing waits for a device to say which token that is."""

    def __init__(self, num_cells: int, runner: ForwardRunner) -> None:
        self._runner = runner
        # Cell 0 promises nothing and stays 0.
        self._tokens = runner.to_device(np.zeros(num_cells + 1, dtype=np.int64))

    def resolve(self, input_ids: IntArray) -> Any:
        """`input_ids` with every placeholder replaced; the array that was given is left as it is."""
        cells = np.maximum(-input_ids, 0)
        if not cells.any():
            return input_ids
        known = np.maximum(input_ids, 0)
        return self._runner.to_device(known) + self._tokens[self._runner.to_device(cells)]

    def store(self, base: int, token_ids: Any) -> None:
        """Keeps the tokens of a batch in the cells from `base` on."""
        self._tokens[base : base + len(token_ids)] = token_ids


class TpModelWorkerClient:
    """A `TpModelWorker` that takes a batch before the last one is done.

    Only this thread calls the runner, and so only it uses the group's `device_group`.  A device that computes
    while it launches (the CPU) does so here; one that launches and goes on (a GPU, sim) gets the next batch
    as soon as it is queued, and it is the scheduler that waits for the results.
    """

    def __init__(self, worker: TpModelWorker) -> None:
        self._runner = worker.rank.runner
        self._future_tokens = FutureTokenMap(worker.rank.config.future_cells, self._runner)
        self._batches: SimpleQueue[ScheduleBatch] = SimpleQueue()
        self._launched: SimpleQueue[PendingForward | BaseException] = SimpleQueue()
        self._trace = trace.track()
        self._forward_trace = trace.track("forward")
        threading.Thread(target=self._forward_thread, name="forward", daemon=True).start()

    def forward_batch_generation(self, batch: ScheduleBatch) -> None:
        """Queues `batch` and returns at once."""
        self._batches.put(batch)
        self._trace.lap("queue put")

    def resolve_batch_result(self) -> ForwardResult:
        """The result of the oldest batch not yet asked for; waits for it.  Raises what its forward raised."""
        pending = self._launched.get()
        self._trace.lap("launch wait")
        if isinstance(pending, BaseException):
            raise pending
        result = pending.wait()
        self._trace.lap("device wait")
        return result

    def _forward_thread(self) -> None:
        try:
            while True:
                self._launched.put(self._launch(self._batches.get()))
        except BaseException as error:
            self._launched.put(error)

    def _launch(self, batch: ScheduleBatch) -> PendingForward:
        start_ns = self._forward_trace.now()
        forward = batch.forward
        forward.input_ids = self._future_tokens.resolve(forward.input_ids)
        pending = self._runner.launch(forward)
        self._future_tokens.store(batch.future_base, pending.device_token_ids)
        self._forward_trace.span("device launch", start_ns)
        return pending
