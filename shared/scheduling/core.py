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
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.executor.forward_batch import ForwardBatch, ForwardMode, ForwardResult
from shared.mem_cache.token_memory import TokenMemory
from shared.messages import (
    AbortReq,
    FinishReason,
    FlushCacheOut,
    FlushCacheReq,
    GetInternalStateOut,
    GetInternalStateReq,
    IntArray,
    SamplingParams,
    SchedulerInput,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from shared.scheduling.admission import RETRACT_DECODE_STEPS, NewTokenEstimate, remaining_new_tokens
from shared.scheduling.batch import RunningBatch, ScheduleBatch, logprob_rows, make_sampling_batch
from shared.scheduling.outputs import OutputCollector
from shared.scheduling.policy import SchedulePolicy
from shared.scheduling.req import Req, StopFinder

logger = logging.getLogger(__name__)

WHOLE_PREFILL_TOKENS = 16384
"""Tokens of one prefill at most when prompts are not chunked; a longer prompt still runs, alone."""

RETRY_ADMISSION_FORWARDS = 32
"""A queue whose head did not fit is looked at again when a slot comes free, and this often in any case."""

MakeStopFinder = Callable[[SamplingParams], StopFinder]


@dataclass(frozen=True)
class SchedulerConfig:
    """Everything that decides what a scheduler does; the same on every rank of a replica.

    `make_stop_finder` is asked once for each request with stop strings.  `prefill_tokens` is None for whole
    prompts.
    """

    max_total_num_tokens: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    make_stop_finder: MakeStopFinder
    prefill_tokens: int | None = None
    policy: str = "lpm"
    conservativeness: float = 1.0
    use_radix_cache: bool = True
    stream_interval: int = 1
    random_seed: int = 0
    dp_rank: int = 0
    overlap: bool = False

    @property
    def future_cells(self) -> int:
        """Cells of the future-token map, numbered from 1; the batches in flight and the next fit."""
        return self.max_running_requests * 4


class _Pick(NamedTuple):
    """The part of a prompt that goes into the coming prefill."""

    req: Req
    start: int
    end: int


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
        self.waiting: list[Req] = []
        self.running = RunningBatch()
        self.chunked: Req | None = None
        self.inflight: list[ScheduleBatch] = []
        self.forwards = 0
        self.retractions = 0
        self.leaks = 0
        self._policy = SchedulePolicy(config.policy, self.memory.tree, config.random_seed)
        self._estimate = NewTokenEstimate(config.conservativeness)
        self._outputs = OutputCollector(config.stream_interval)
        self._live: dict[str, Req] = {}
        self._round = 0
        self._admission_blocked = False
        self._decode_turn = False
        self._future_next = 0
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
        room = min(self.config.context_length, self.memory.capacity) - len(recv.input_ids)
        params = recv.sampling_params
        stop_finder = self.config.make_stop_finder(params) if params.stop else None
        req = Req(recv, self.config.eos_token_ids, min(params.max_new_tokens, room), stop_finder)
        if room < 1:
            message = f"{len(recv.input_ids)} prompt tokens leave no room for an answer"
            req.finish = FinishReason("abort", message=message, status=400)
            self._outputs.add_tokens([req])
            return
        req.arrival_round = self._round
        self.waiting.append(req)
        self._live[req.rid] = req

    def _abort(self, rid: str | None) -> None:
        targets = list(self._live.values()) if rid is None else [self._live[rid]] if rid in self._live else []
        aborted = [req for req in targets if req.finish is None]
        for req in aborted:
            req.finish = FinishReason("abort", message="aborted")
        self._outputs.add_tokens(aborted)
        self._retire(aborted)
        gone = {id(req) for req in aborted}
        self.waiting = [req for req in self.waiting if id(req) not in gone]
        if self.chunked is not None and self.chunked.finish is not None:
            self.chunked = None
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
        return not (self.waiting or self.running.reqs or self.chunked or self.inflight)

    def get_next_batch_to_run(self, *, decode_only: bool = False) -> ScheduleBatch | None:
        """The next forward: a prefill if one can be formed, else a decode.  None with nothing to do.

        Between two chunks of a long prompt the running requests get a turn.  With a batch in flight, None may
        also mean that it must be processed first.
        """
        batch = None
        if not (decode_only or (self._decode_turn and self.running.reqs)):
            batch = self._next_prefill()
        if batch is None and self.running.reqs:
            batch = self._next_decode()
        if batch is not None:
            self.inflight.append(batch)
        return batch

    def _next_prefill(self) -> ScheduleBatch | None:
        budget = self.config.prefill_tokens
        picks: list[_Pick] = []
        if self.chunked is not None:
            picks.append(self._chunk(self.chunked, budget))
            budget = None if budget is None else budget - (picks[0].end - picks[0].start)
        if self.chunked is None and self.waiting and not self._admission_blocked:
            picks.extend(self._admit(budget))
        if not picks:
            return None
        self._decode_turn = self.chunked is not None
        return self._launch_prefill(picks)

    def _chunk(self, req: Req, budget: int | None) -> _Pick:
        """The next part of an admitted prompt, `budget` tokens at most; shared with others from now on."""
        start, end = req.prefilled_len, len(req.fill_ids)
        if budget is not None and end - start > budget:
            end = start + budget
        self.chunked = req if end < len(req.fill_ids) else None
        req.prefilled_len = end
        self.memory.share_prefilled(req)
        return _Pick(req, start, end)

    def _admit(self, budget: int | None) -> list[_Pick]:
        """Takes requests out of the queue, best first, until tokens, slots or rows run out."""
        memory = self.memory
        rows = min(memory.rows.free_count, self.config.max_running_requests - len(self.running))
        if rows <= 0:
            return []
        reserved = self._estimate.reserve(self.running.reqs)
        left = WHOLE_PREFILL_TOKENS if budget is None else budget
        picks: list[_Pick] = []
        for req in self._policy.order(self.waiting, self._round):
            if len(picks) == rows or left <= 0 or self.chunked is not None:
                break
            req.set_fill_ids()
            prefix = memory.lock_prefix(req)
            extend = len(req.fill_ids) - len(prefix)
            wanted = extend + remaining_new_tokens(req)
            too_long = budget is None and extend > left and bool(picks)
            if wanted + reserved > memory.available or too_long:
                memory.unlock_prefix(req)
                self._admission_blocked = not picks and bool(self.running.reqs)
                break
            memory.admit(req, prefix)
            reserved += wanted - extend
            if req.cached_tokens is None:
                req.cached_tokens = len(prefix)
            picks.append(self._chunk(req, budget if budget is None else left))
            left -= picks[-1].end - picks[-1].start
        if picks:
            self._round += 1
            admitted = {id(pick.req) for pick in picks}
            self.waiting = [req for req in self.waiting if id(req) not in admitted]
        return picks

    def _launch_prefill(self, picks: list[_Pick]) -> ScheduleBatch:
        reqs = [pick.req for pick in picks]
        rows = np.array([req.row for req in reqs], dtype=np.int64)
        starts = np.array([pick.start for pick in picks], dtype=np.int64)
        ends = np.array([pick.end for pick in picks], dtype=np.int64)
        table = self.memory.table
        forward = ForwardBatch(
            step=self.forwards,
            mode=ForwardMode.EXTEND,
            rids=[req.rid for req in reqs],
            input_ids=np.concatenate([pick.req.fill_ids[pick.start : pick.end] for pick in picks]),
            positions=np.concatenate([np.arange(pick.start, pick.end) for pick in picks]),
            req_pool_indices=rows,
            seq_lens=ends,
            extend_lens=ends - starts,
            out_cache_loc=np.concatenate([table[pick.req.row, pick.start : pick.end] for pick in picks]).astype(
                np.int64
            ),
            req_to_token=table,
            emits=np.array([pick.end == len(pick.req.fill_ids) for pick in picks], dtype=np.bool_),
            output_lens=np.array([len(req.output_ids) for req in reqs], dtype=np.int64),
            sampling=make_sampling_batch(reqs, self.config.vocab_size),
            top_logprobs_nums=logprob_rows(reqs),
        )
        batch = self._batch(reqs, forward, len(self.running))
        cells = -(batch.future_base + np.arange(len(reqs), dtype=np.int64))
        self.running.append(batch, cells[forward.emits])
        return batch

    def _next_decode(self) -> ScheduleBatch | None:
        running, memory = self.running, self.memory
        if memory.slots.free_count < len(running) and memory.available < len(running):
            if self.inflight:
                return None  # whom to retract is decided on what has come out, so wait for it
            self._retract()
            if not running.reqs:
                return None
        slots = memory.alloc(len(running))
        memory.table[running.rows, running.seq_lens] = slots
        positions = running.seq_lens
        running.seq_lens = positions + 1
        forward = ForwardBatch(
            step=self.forwards,
            mode=ForwardMode.DECODE,
            rids=running.rids,
            input_ids=running.last_tokens,
            positions=positions,
            req_pool_indices=running.rows,
            seq_lens=running.seq_lens,
            extend_lens=running.ones,
            out_cache_loc=slots,
            req_to_token=memory.table,
            emits=running.emits,
            output_lens=running.output_lens,
            sampling=running.sampling,
            top_logprobs_nums=running.top_logprobs_nums,
        )
        running.output_lens = running.output_lens + 1
        batch = self._batch(running.reqs, forward, 0)
        if self.config.overlap:
            running.last_tokens = -(batch.future_base + np.arange(len(running), dtype=np.int64))
        self._decode_turn = False
        self._estimate.decoded()
        if self.forwards % RETRY_ADMISSION_FORWARDS == 0:
            self._admission_blocked = False
        return batch

    def _batch(self, reqs: list[Req], forward: ForwardBatch, running_offset: int) -> ScheduleBatch:
        self.forwards += 1
        if self._future_next + len(reqs) > self.config.future_cells:
            self._future_next = 0
        base = self._future_next + 1
        self._future_next += len(reqs)
        return ScheduleBatch(reqs, forward, running_offset, base)

    def _retract(self) -> None:
        """Sends running requests back to the queue until those that stay have slots for some steps.

        The ones with the fewest tokens go first, of equals the one admitted last: little work is lost.  Their
        tokens are kept and, as far as the cache still holds them, their KV too.
        """
        running = self.running
        order = sorted(range(len(running)), key=lambda i: (-len(running.reqs[i].output_ids), i))
        out: list[int] = []
        keep_one = self.chunked is None
        while len(order) > keep_one:
            needed = len(order) * (1 if len(order) == 1 else RETRACT_DECODE_STEPS)
            if out and self.memory.available >= needed:
                break
            i = order.pop()
            self.memory.release(running.reqs[i], int(running.seq_lens[i]))
            out.append(i)
        keep = np.ones(len(running), dtype=np.bool_)
        keep[out] = False
        gone = [running.reqs[i] for i in sorted(out)]
        for req in gone:
            req.arrival_round = self._round
        running.filter(keep)
        self.waiting[:0] = gone
        self.retractions += len(gone)
        self._estimate.retracted(running.reqs)
        self._admission_blocked = False

    # -- a result ------------------------------------------------------------------------------------------

    def process_batch_result(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        """Appends the tokens of the oldest launched batch, ends who is done, and collects what to send."""
        assert self.inflight[0] is batch, "batches are processed in launch order"
        del self.inflight[0]
        forward, reqs = batch.forward, batch.reqs
        tokens = result.next_token_ids.tolist()
        decoding = batch.forward.mode == ForwardMode.DECODE
        if not self.config.overlap:
            self._fill_in_tokens(batch, result.next_token_ids, decoding)
        emitted: list[Req] = []
        ended: list[Req] = []
        left_over: list[Req] = []
        emits = None if decoding else forward.emits.tolist()
        for i, req in enumerate(reqs):
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
        if self.chunked is not None and self.chunked.finish is not None:
            self.chunked = None
        if ended:
            self._retire(ended, batch)
        self._release_unless_in_flight(left_over, batch)
        if ended or left_over:
            self._check_idle()

    def _leave_cells(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        """Puts known tokens in place of cells, which are used again, for rows that have yet to decode."""
        cells = -self.running.last_tokens - batch.future_base
        known = (cells >= 0) & (cells < len(batch.reqs))
        if known.any():
            self.running.last_tokens = self.running.last_tokens.copy()
            self.running.last_tokens[known] = result.next_token_ids[cells[known]]

    def _fill_in_tokens(self, batch: ScheduleBatch, tokens: IntArray, decoding: bool) -> None:
        """Puts what was sampled where the running batch had placeholders."""
        running = self.running
        if decoding:
            running.last_tokens = tokens
            return
        emitted = tokens[batch.forward.emits]
        offset = batch.running_offset
        running.last_tokens = np.concatenate([running.last_tokens[:offset], emitted])

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
        """Takes finished requests out of the running batch, and their slots back once no launch uses them."""
        self._release_unless_in_flight(ended, batch)
        running = self.running
        if any(req.finish is not None for req in running.reqs):
            running.filter(np.array([req.finish is None for req in running.reqs], dtype=np.bool_))

    def _release_unless_in_flight(self, reqs: list[Req], batch: ScheduleBatch | None) -> None:
        for req in reqs:
            if any(req in later.reqs for later in self.inflight):
                continue
            if req.row >= 0:
                failed = req.finish is not None and req.finish.status == 500
                self.memory.release(req, self._allocated(req, batch), keep=not failed)
            if self._live.get(req.rid) is req:
                del self._live[req.rid]
            self._admission_blocked = False

    def _allocated(self, req: Req, batch: ScheduleBatch | None) -> int:
        """How many slots the row of `req` holds: its prompt's, and one for each decode launched since."""
        for reqs, seq_lens in (
            (self.running.reqs, self.running.seq_lens),
            *(((batch.reqs, batch.forward.seq_lens),) if batch else ()),
        ):
            if req in reqs:
                return max(len(req.fill_ids), int(seq_lens[reqs.index(req)]))
        return len(req.fill_ids)

    # -- messages out --------------------------------------------------------------------------------------

    def take_outputs(self) -> list[SchedulerOutput]:
        """What is to be sent since the last call, `SchedulerStats` last and only when the load has changed."""
        load = (len(self.running) + (self.chunked is not None), len(self.waiting))
        if load != self._reported:
            self._reported = load
            self._outputs.add(self.stats())
        return self._outputs.take()

    @property
    def has_stream_output(self) -> bool:
        """Whether something waits in `take_outputs` while a streaming request runs."""
        return self._outputs.pending and any(req.stream for req in self.running.reqs)

    def stats(self) -> SchedulerStats:
        memory = self.memory
        return SchedulerStats(
            dp_rank=self.config.dp_rank,
            running=len(self.running) + (self.chunked is not None),
            waiting=len(self.waiting),
            free_tokens=memory.slots.free_count,
            evictable_tokens=memory.evictable,
            protected_tokens=memory.protected,
            capacity_tokens=memory.capacity,
            free_request_slots=memory.rows.free_count,
            max_running_requests=self.config.max_running_requests,
            forwards=self.forwards,
            retractions=self.retractions,
            leaks=self.leaks,
        )

    def _check_idle(self) -> None:
        """With nothing left to do every slot must be accounted for."""
        if not self.idle:
            return
        self._estimate.idle()
        self._admission_blocked = False
        leak = self.memory.leak()
        if leak is not None:
            self.leaks += 1
            logger.error("token slots have leaked: %s", leak)
