"""The batch between two forwards, as parallel arrays: one numpy call a step, not one Python line a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from shared.executor.forward_batch import BoolArray, FloatArray, ForwardBatch, ForwardMode, SamplingBatch, TokenCounts
from shared.messages import GREEDY_TEMPERATURE, IntArray
from shared.scheduling.req import Req


@dataclass(slots=True)
class ScheduleBatch:
    """A forward together with its requests: what `SchedulerCore` launches and later processes.

    `future_base` is the cell of the future-token map that row 0's token goes to (cells count from 1).
    """

    reqs: list[Req]
    forward: ForwardBatch
    future_base: int

    @property
    def is_prefill(self) -> bool:
        return self.forward.mode == ForwardMode.EXTEND


@dataclass(slots=True)
class RunningBatch:
    """The requests that decode, row by row in admission order.  All arrays are `[bs]`."""

    reqs: list[Req] = field(default_factory=list)
    rids: list[str] = field(default_factory=list)
    rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    seq_lens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens that have a slot: all but the newest."""
    output_lens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    last_tokens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The newest token of each, or the negative cell it will be in."""
    sampling: SamplingBatch = field(default_factory=lambda: make_sampling_batch([], 0))
    top_logprobs_nums: list[int | None] | None = None
    ones: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    emits: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.reqs)

    def append(self, batch: ScheduleBatch, last_tokens: IntArray) -> None:
        """Takes in the rows of a prefill that emit a token; `last_tokens` is theirs, int64 `[rows]`."""
        forward = batch.forward
        keep = forward.emits
        reqs = [req for req, emits in zip(batch.reqs, keep.tolist(), strict=True) if emits]
        if not reqs:
            return
        self.reqs = self.reqs + reqs
        self.rows = np.concatenate([self.rows, forward.req_pool_indices[keep]])
        self.seq_lens = np.concatenate([self.seq_lens, forward.seq_lens[keep]])
        self.output_lens = np.concatenate([self.output_lens, forward.output_lens[keep] + 1])
        self.last_tokens = np.concatenate([self.last_tokens, last_tokens])
        self.sampling = concat_sampling(self.sampling, filter_sampling(forward.sampling, keep))
        self._refresh()

    def filter(self, keep: BoolArray) -> None:
        """Drops the rows where `keep` (bool `[bs]`) is False."""
        self.reqs = [req for req, kept in zip(self.reqs, keep.tolist(), strict=True) if kept]
        self.rows = self.rows[keep]
        self.seq_lens = self.seq_lens[keep]
        self.output_lens = self.output_lens[keep]
        self.last_tokens = self.last_tokens[keep]
        self.sampling = filter_sampling(self.sampling, keep)
        self._refresh()

    def _refresh(self) -> None:
        self.rids = [req.rid for req in self.reqs]
        self.top_logprobs_nums = logprob_rows(self.reqs)
        self.ones = np.ones(len(self.reqs), dtype=np.int64)
        self.emits = np.ones(len(self.reqs), dtype=np.bool_)


def logprob_rows(reqs: list[Req]) -> list[int | None] | None:
    """`ForwardBatch.top_logprobs_nums` of these requests."""
    if not any(req.return_logprob for req in reqs):
        return None
    return [req.top_logprobs_num if req.return_logprob else None for req in reqs]


def make_sampling_batch(reqs: list[Req], vocab_size: int) -> SamplingBatch:
    """The sampling rows of newly admitted requests.  Gives those with penalties their `TokenCounts`."""
    params = [req.params for req in reqs]
    counts: list[TokenCounts | None] = []
    blocked: list[tuple[int, IntArray] | None] = []
    bias: list[tuple[IntArray, FloatArray] | None] = []
    for req, p in zip(reqs, params, strict=True):
        if req.needs_counts and req.counts is None:
            req.counts = TokenCounts(vocab_size, req.prompt_ids, req.output_ids)
        counts.append(req.counts)
        if p.min_new_tokens and req.stop_ids:
            blocked.append((p.min_new_tokens, np.array(sorted(req.stop_ids), dtype=np.int64)))
        else:
            blocked.append(None)
        if p.logit_bias:
            ids, values = zip(*p.logit_bias, strict=True)
            bias.append((np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)))
        else:
            bias.append(None)
    greedy = np.array([p.temperature <= GREEDY_TEMPERATURE for p in params], dtype=np.bool_)
    return SamplingBatch(
        greedy=greedy,
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([p.top_k if p.top_k > 0 else vocab_size for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        min_p=np.array([p.min_p for p in params], dtype=np.float32),
        frequency_penalty=np.array([p.frequency_penalty for p in params], dtype=np.float32),
        presence_penalty=np.array([p.presence_penalty for p in params], dtype=np.float32),
        repetition_penalty=np.array([p.repetition_penalty for p in params], dtype=np.float32),
        seed=np.array([p.seed for p in params], dtype=np.uint64),
        counts=counts,
        logit_bias=bias,
        blocked_until=blocked,
        all_greedy=bool(greedy.all()),
        any_adjustment=_any_adjustment(counts, bias, blocked),
    )


_ARRAYS = (
    "greedy",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
_LISTS = ("counts", "logit_bias", "blocked_until")


def filter_sampling(batch: SamplingBatch, keep: BoolArray) -> SamplingBatch:
    """The rows where `keep` (bool `[bs]`) is True."""
    kept = keep.tolist()
    fields = {name: getattr(batch, name)[keep] for name in _ARRAYS}
    lists = {name: [x for x, k in zip(getattr(batch, name), kept, strict=True) if k] for name in _LISTS}
    return _assemble(fields, lists)


def concat_sampling(first: SamplingBatch, second: SamplingBatch) -> SamplingBatch:
    """The rows of both, `first`'s first."""
    fields = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in _ARRAYS}
    lists = {name: getattr(first, name) + getattr(second, name) for name in _LISTS}
    return _assemble(fields, lists)


def _assemble(fields: dict[str, Any], lists: dict[str, list[Any]]) -> SamplingBatch:
    return SamplingBatch(
        **fields,
        **cast(dict[str, Any], lists),
        all_greedy=bool(fields["greedy"].all()),
        any_adjustment=_any_adjustment(*lists.values()),
    )


def _any_adjustment(*lists: Sequence[object]) -> bool:
    return any(row is not None for rows in lists for row in rows)
