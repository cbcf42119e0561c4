"""Forms the batches: who is admitted, who decodes, and who must go back when the slots run out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shared import trace
from shared.executor.forward_batch import ForwardBatch, ForwardMode
from shared.mem_cache.token_memory import TokenMemory
from shared.messages import IntArray
from shared.scheduling.admission import RETRACT_DECODE_STEPS, NewTokenEstimate, remaining_new_tokens
from shared.scheduling.batch import RunningBatch, ScheduleBatch, logprob_rows, make_sampling_batch
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.policy import SchedulePolicy
from shared.scheduling.req import Req

WHOLE_PREFILL_TOKENS = 16384
"""Tokens of one prefill at most when prompts are not chunked; a longer prompt still runs, alone."""

RETRY_ADMISSION_FORWARDS = 32
"""A queue whose head did not fit is looked at again when a slot comes free, and this often in any case."""


class _Pick(NamedTuple):
    """The part of a prompt that goes into the coming prefill."""

    req: Req
    start: int
    end: int


class Batcher:
    """The requests that wait, prefill and decode, and the forwards made of them.

    `chunked` is the one request whose prompt is only partly prefilled.  All decisions are functions of the
    calls alone, never of the clock.
    """

    def __init__(self, config: SchedulerConfig, memory: TokenMemory) -> None:
        self.config = config
        self.memory = memory
        self.waiting: list[Req] = []
        self.running = RunningBatch()
        self.chunked: Req | None = None
        self.forwards = 0
        self.retractions = 0
        self._policy = SchedulePolicy(config.policy, memory.tree, config.random_seed)
        self._estimate = NewTokenEstimate(config.conservativeness)
        self._round = 0
        self._admission_blocked = False
        self._decode_turn = False
        self._future_next = 0
        self._trace = trace.track()

    @property
    def num_running(self) -> int:
        """Requests that hold a row: decoding, or with part of their prompt done."""
        return len(self.running) + (self.chunked is not None)

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.running.reqs or self.chunked)

    def enqueue(self, req: Req) -> None:
        req.arrival_round = self._round
        self.waiting.append(req)

    def drop_finished(self) -> None:
        """Forgets the requests that have a finish reason, wherever they are."""
        if any(req.finish is not None for req in self.waiting):
            self.waiting = [req for req in self.waiting if req.finish is None]
        if self.chunked is not None and self.chunked.finish is not None:
            self.chunked = None
        if any(req.finish is not None for req in self.running.reqs):
            self.running.filter(np.array([req.finish is None for req in self.running.reqs], dtype=np.bool_))

    def slots_came_free(self) -> None:
        """A queue whose head did not fit is worth another look."""
        self._admission_blocked = False

    def rest(self) -> None:
        """Nothing is left to do: what was learnt of the last load is forgotten."""
        self._estimate.idle()
        self._admission_blocked = False

    def allocated(self, req: Req, batch: ScheduleBatch | None) -> int:
        """How many slots the row of `req` holds: its prompt's, and one for each decode launched since.

        `batch` is the last one it was in, for a request that no longer runs.
        """
        places = [(self.running.reqs, self.running.seq_lens)]
        if batch is not None:
            places.append((batch.reqs, batch.forward.seq_lens))
        for reqs, seq_lens in places:
            if req in reqs:
                return max(len(req.fill_ids), int(seq_lens[reqs.index(req)]))
        return len(req.fill_ids)

    def settle_tokens(self, batch: ScheduleBatch, tokens: IntArray) -> None:
        """Puts the sampled `tokens`, `[bs]`, in place of the cells that promised them.

        A cell is used again once its batch has been processed, and a request may wait for its next decode for
        longer than that.
        """
        running = self.running
        if not (batch.is_prefill or self.config.overlap):
            running.last_tokens = tokens
            return
        rows = -running.last_tokens - batch.future_base
        known = (rows >= 0) & (rows < len(tokens))
        if known.any():
            running.last_tokens = running.last_tokens.copy()
            running.last_tokens[known] = tokens[rows[known]]

    def next_batch(self, *, decode_only: bool, may_retract: bool) -> ScheduleBatch | None:
        """The next forward: a prefill if one can be formed, else a decode.

        Between two chunks of a long prompt the running requests get a turn.  None with nothing to do, or
        where slots have run out and `may_retract` is False.
        """
        if not (decode_only or (self._decode_turn and self.running.reqs)):
            batch = self._next_prefill()
            if batch is not None:
                return batch
        return self._next_decode(may_retract) if self.running.reqs else None

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
        self._trace.lap("schedule")
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
        batch = self._batch(reqs, forward)
        cells = -(batch.future_base + np.arange(len(reqs), dtype=np.int64))
        self.running.append(batch, cells[forward.emits])
        return batch

    def _next_decode(self, may_retract: bool) -> ScheduleBatch | None:
        running, memory = self.running, self.memory
        if memory.slots.free_count < len(running) and memory.available < len(running):
            if not may_retract:
                return None
            self._retract()
            if not running.reqs:
                return None
        self._trace.lap("schedule")
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
        batch = self._batch(running.reqs, forward)
        if self.config.overlap:
            running.last_tokens = -(batch.future_base + np.arange(len(running), dtype=np.int64))
        self._decode_turn = False
        self._estimate.decoded()
        if self.forwards % RETRY_ADMISSION_FORWARDS == 0:
            self._admission_blocked = False
        return batch

    def _batch(self, reqs: list[Req], forward: ForwardBatch) -> ScheduleBatch:
        self.forwards += 1
        if self._future_next + len(reqs) > self.config.future_cells:
            self._future_next = 0
        base = self._future_next + 1
        self._future_next += len(reqs)
        return ScheduleBatch(reqs, forward, base)

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
