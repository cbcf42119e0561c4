"""The scheduler's state and its three verbs: take requests in, form the next batch, process a result.

    core.process_input_requests(recv_reqs)
    batch = core.get_next_batch_to_run()
    core.process_batch_result(batch, runner.launch(batch.forward).wait())
    messages = core.take_outputs()

Stages 1-3 call them in turn (`shared.executor.engine_step`); stage 4's overlapped loop forms batch k+1 before
it processes batch k.  For that, `overlap=True` feeds a decode with negative cells of the future-token map in
place of tokens that are not known yet, and whatever a launched batch still uses (a row, its slots) is taken
back only when that batch has been processed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from shared.executor.forward_batch import ForwardResult
from shared.mem_cache.token_memory import TokenMemory
from shared.messages import (
    AbortReq,
    FinishReason,
    FlushCacheOut,
    FlushCacheReq,
    GetInternalStateOut,
    GetInternalStateReq,
    SchedulerInput,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from shared.scheduling.batch import ScheduleBatch
from shared.scheduling.batcher import Batcher
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.outputs import OutputCollector
from shared.scheduling.picture import picture_ids
from shared.scheduling.req import Req

logger = logging.getLogger(__name__)


class SchedulerCore:
    """One rank's scheduler.  Deterministic: the same calls give the same batches, whatever the clock says."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.memory = TokenMemory(
            config.max_total_num_tokens,
            config.max_running_requests,
            config.context_length + 1,
            use_tree=config.use_radix_cache,
        )
        self.batcher = Batcher(config, self.memory)
        self.inflight: list[ScheduleBatch] = []
        self.leaks = 0
        self._outputs = OutputCollector(config.stream_interval)
        self._live: dict[str, Req] = {}
        self._reported = (0, 0)

    # -- requests in ---------------------------------------------------------------------------------------

    def process_input_requests(self, recv_reqs: list[SchedulerInput]) -> None:
        """Takes in what arrived, in order."""
        for recv in recv_reqs:
            if isinstance(recv, TokenizedGenerateReqInput):
                self._enqueue(recv)
            elif isinstance(recv, AbortReq):
                self._abort(recv.rid)
            elif isinstance(recv, FlushCacheReq):
                self._outputs.add(self._flush_cache(recv.id))
            elif isinstance(recv, GetInternalStateReq):
                self._outputs.add(GetInternalStateOut(recv.id, self.stats()))
            else:
                raise TypeError(f"a scheduler does not take {type(recv).__name__}")

    def _enqueue(self, recv: TokenizedGenerateReqInput) -> None:
        if recv.image_data is not None:
            picture = picture_ids(recv.image_data, self.config.vocab_size)
            recv = replace(recv, input_ids=np.concatenate([picture, recv.input_ids]), image_data=None)
        room = min(self.config.context_length, self.memory.capacity) - len(recv.input_ids)
        params = recv.sampling_params
        stop_finder = self.config.make_stop_finder(params) if params.stop else None
        req = Req(recv, self.config.eos_token_ids, min(params.max_new_tokens, room), stop_finder)
        if room < 1:
            message = f"{len(recv.input_ids)} prompt tokens leave no room for an answer"
            req.finish = FinishReason("abort", message=message, status=400)
            self._outputs.add_tokens([req])
            return
        self.batcher.enqueue(req)
        self._live[req.rid] = req

    def _abort(self, rid: str | None) -> None:
        targets = list(self._live.values()) if rid is None else [self._live[rid]] if rid in self._live else []
        aborted = [req for req in targets if req.finish is None]
        for req in aborted:
            req.finish = FinishReason("abort", message="aborted")
        self._outputs.add_tokens(aborted)
        self._retire(aborted)
        self._check_idle()

    def _flush_cache(self, id: str) -> FlushCacheOut:
        busy = len(self._live)
        if busy:
            return FlushCacheOut(id, self.config.dp_rank, False, f"{busy} requests are running or waiting")
        self.memory.flush()
        return FlushCacheOut(id, self.config.dp_rank, True, "the prefix cache is empty")

    # -- the next batch ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request is waiting, running or in flight."""
        return self.batcher.is_empty and not self.inflight

    @property
    def forwards(self) -> int:
        """Forwards launched so far."""
        return self.batcher.forwards

    def get_next_batch_to_run(self, *, decode_only: bool = False) -> ScheduleBatch | None:
        """The next forward: a prefill if one can be formed, else a decode.  None with nothing to do.

        With a batch in flight, None may also mean that it must be processed first: whom to retract is decided
        on what has come out.
        """
        batch = self.batcher.next_batch(decode_only=decode_only, may_retract=not self.inflight)
        if batch is not None:
            self.inflight.append(batch)
        return batch

    # -- a result ------------------------------------------------------------------------------------------

    def process_batch_result(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        """Appends the tokens of the oldest launched batch, ends who is done, and collects what to send."""
        assert self.inflight[0] is batch, "batches are processed in launch order"
        del self.inflight[0]
        tokens = result.next_token_ids.tolist()
        self.batcher.settle_tokens(batch, result.next_token_ids)
        emitted: list[Req] = []
        ended: list[Req] = []
        left_over: list[Req] = []
        emits = batch.forward.emits.tolist() if batch.is_prefill else None
        for i, req in enumerate(batch.reqs):
            if req.finish is not None:
                left_over.append(req)
                continue
            if result.failed is not None and result.failed[i]:
                req.finish = FinishReason("abort", message="the model's logits hold NaN", status=500)
                ended.append(req)
                emitted.append(req)
                continue
            if emits is not None and not emits[i]:
                continue
            token = tokens[i]
            output_ids = req.output_ids
            output_ids.append(token)
            if result.logprobs is not None:
                logprob = result.logprobs[i]
                if logprob is not None:
                    req.logprobs.append(logprob)
            if len(output_ids) >= req.max_new_tokens or token in req.stop_ids or req.stop_finder:
                self._check_finished(req, token)
                if req.finish is not None:
                    ended.append(req)
            emitted.append(req)
        self._outputs.add_tokens(emitted)
        if ended:
            self._retire(ended, batch)
        self._release_unless_in_flight(left_over, batch)
        if ended or left_over:
            self._check_idle()

    def _check_finished(self, req: Req, token: int) -> None:
        n = len(req.output_ids)
        stop = req.stop_finder.push(token) if req.stop_finder else None
        if n > req.params.min_new_tokens and token in req.stop_ids:
            req.finish = FinishReason("stop", matched=token)
        elif stop is not None:
            req.finish = FinishReason("stop", matched=stop)
        elif n >= req.max_new_tokens:
            req.finish = FinishReason("length")

    def _retire(self, ended: list[Req], batch: ScheduleBatch | None = None) -> None:
        """Takes finished requests out of the batcher, and their slots back once no launch uses them."""
        self._release_unless_in_flight(ended, batch)
        self.batcher.drop_finished()

    def _release_unless_in_flight(self, reqs: list[Req], batch: ScheduleBatch | None) -> None:
        """`batch` is the one just processed, if that is where the requests have ended."""
        for req in reqs:
            if any(req in later.reqs for later in self.inflight):
                continue
            if req.row >= 0:
                failed = req.finish is not None and req.finish.status == 500
                self.memory.release(req, self.batcher.allocated(req, batch), keep=not failed)
            if self._live.get(req.rid) is req:
                del self._live[req.rid]
            self.batcher.slots_came_free()

    # -- messages out --------------------------------------------------------------------------------------

    def take_outputs(self) -> list[SchedulerOutput]:
        """What is to be sent since the last call, `SchedulerStats` last and only when the load has changed."""
        load = (self.batcher.num_running, len(self.batcher.waiting))
        if load != self._reported:
            self._reported = load
            self._outputs.add(self.stats())
        return self._outputs.take()

    @property
    def has_stream_output(self) -> bool:
        """Whether something waits in `take_outputs` while a streaming request runs."""
        return self._outputs.pending and any(req.stream for req in self.batcher.running.reqs)

    def stats(self) -> SchedulerStats:
        memory = self.memory
        return SchedulerStats(
            dp_rank=self.config.dp_rank,
            running=self.batcher.num_running,
            waiting=len(self.batcher.waiting),
            free_tokens=memory.slots.free_count,
            evictable_tokens=memory.evictable,
            protected_tokens=memory.protected,
            capacity_tokens=memory.capacity,
            free_request_slots=memory.rows.free_count,
            max_running_requests=self.config.max_running_requests,
            forwards=self.forwards,
            retractions=self.batcher.retractions,
            leaks=self.leaks,
        )

    def _check_idle(self) -> None:
        """With nothing left to do every slot must be accounted for."""
        if not self.idle:
            return
        self.batcher.rest()
        leak = self.memory.leak()
        if leak is not None:
            self.leaks += 1
            logger.error("token slots have leaked: %s", leak)
