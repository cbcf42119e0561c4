"""The object that stages 1-3 drive on every rank: `step(recv_reqs) -> outputs`."""

from __future__ import annotations

from shared import trace
from shared.executor.rank import Rank
from shared.messages import SchedulerInput, SchedulerOutput
from shared.scheduling.batch import ScheduleBatch
from shared.scheduling.core import SchedulerCore

ERA_DECODE_STEPS = 10
"""Decode forwards in one call of `step`, in the releases of stages 1-3."""


class EngineStep:
    """One rank's scheduler and runner, one call a step.

    A call takes in what arrived and then runs either one prefill, or up to `decode_steps` decodes.  With
    `cut_on_stream` (stages 2 and 3) it returns as soon as a streaming request has something to send.
    """

    def __init__(self, rank: Rank, *, decode_steps: int, cut_on_stream: bool) -> None:
        self._core = SchedulerCore(rank.config)
        self._runner = rank.runner
        self._decode_steps = decode_steps
        self._cut_on_stream = cut_on_stream
        self._checker = rank.checker
        self._trace = trace.track()

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return self._core.idle

    def step(self, recv_reqs: list[SchedulerInput]) -> list[SchedulerOutput]:
        """One step.  The outputs are for the detokenizer, in order; those of rank 0 count."""
        self._core.process_input_requests(recv_reqs)
        self._trace.lap("process input")
        batch = self._next_batch()
        if batch is not None:
            self._run(batch)
            if not batch.is_prefill:
                self._decode_on()
        outputs = self._core.take_outputs()
        self._trace.lap("collect outputs")
        return outputs

    def _decode_on(self) -> None:
        for _ in range(self._decode_steps - 1):
            if self._cut_on_stream and self._core.has_stream_output:
                return
            batch = self._next_batch(decode_only=True)
            if batch is None:
                return
            self._run(batch)

    def _next_batch(self, *, decode_only: bool = False) -> ScheduleBatch | None:
        batch = self._core.get_next_batch_to_run(decode_only=decode_only)
        if self._checker is not None:
            self._checker.check_batch(batch, self._core.forwards)
        self._trace.lap_batch(batch)
        return batch

    def _run(self, batch: ScheduleBatch) -> None:
        pending = self._runner.launch(batch.forward)
        self._trace.lap("device launch")
        result = pending.wait()
        self._trace.lap("device wait")
        if self._checker is not None:
            self._checker.add_result(batch, result)
        self._core.process_batch_result(batch, result)
        self._trace.lap("process result")
