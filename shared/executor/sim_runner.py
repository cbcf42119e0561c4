"""A device that only takes time: asynchronous as a GPU stream is, and as particular about its input.

Its tokens are a function of the whole context, read through the KV slots of the batch.  Two servers that
schedule the same prompts differently must therefore agree, and a context whose last slot was given to another
request, evicted in use or never written shows up as different text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from shared import trace
from shared.executor.forward_batch import ForwardBatch, ForwardMode, ForwardResult
from shared.executor.mix64 import UInt64Array, mix64
from shared.messages import IntArray, TokenLogprob
from shared.server_args import ServerArgs

DEFAULT_TOTAL_TOKENS = 262_144
WAKE_UP_NS = 90_000
"""By how much a sleep is cut short: about what it overshoots, on Linux 50 us of timer slack and a switch."""
_HALF = np.uint64(32)


class SimForward:
    """A forward whose tokens are known and whose time is not up."""

    __slots__ = ("_end_ns", "_result", "device_token_ids")

    def __init__(self, result: ForwardResult, end_ns: int) -> None:
        self.device_token_ids = result.next_token_ids
        self._end_ns = end_ns
        self._result = result

    def wait(self) -> ForwardResult:
        """Blocks until the device has come to the end of this forward."""
        _sleep_until(self._end_ns)
        return self._result


class SimRunner:
    """A `ForwardRunner` without a model.

    A slot holds the hash of its whole context: the hash in the slot before it plus
    `token_factor * position_factor` (modulo 2**64).  The next token is read off the last slot's hash, and off
    the seed too for rows that are not greedy; all other sampling settings are ignored.

    `forbidden_ids` (the special tokens, so that only limits end a request) are never produced.  A decode
    takes `--sim-decode-ms`, whatever its size; an extend takes `--sim-prefill-us-per-token` for each new
    token.  `launches`, `busy_ns`, `first_launch_ns` and `last_end_ns` (both monotonic) tell what it did.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        vocab_size: int,
        context_length: int,
        forbidden_ids: Iterable[int] = (),
    ) -> None:
        self.max_total_num_tokens = server_args.max_total_tokens or DEFAULT_TOTAL_TOKENS
        self.launches = 0
        self.busy_ns = 0
        self.first_launch_ns = 0
        self.last_end_ns = 0
        self._decode_ns = round(server_args.sim_decode_ms * 1e6)
        self._trace = trace.track(trace.DEVICE_THREAD)
        self._prefill_ns_per_token = server_args.sim_prefill_us_per_token * 1e3

        forbidden = np.fromiter(forbidden_ids, np.int64)
        self._allowed_ids: IntArray = np.setdiff1d(np.arange(vocab_size), forbidden)
        if not self._allowed_ids.size:
            raise ValueError(f"all {vocab_size} ids of the vocabulary are forbidden")
        self._num_allowed = np.uint64(self._allowed_ids.size)
        self._token_factor = mix64(np.arange(vocab_size, dtype=np.uint64))
        # Odd, so that no bit of a token is lost.  One more than the context: under overlap a request that has
        # just reached its last position may be in one more forward, whose token is thrown away.
        self._position_factor = mix64(~np.arange(context_length + 1, dtype=np.uint64)) | np.uint64(1)
        # One more, for pools that keep slot 0 or the last one as padding.
        self._slot_hash = np.zeros(self.max_total_num_tokens + 1, dtype=np.uint64)

    @property
    def busy_share(self) -> float:
        """Busy time over the time from the first launch to the end of the last forward, 0 to 1."""
        return self.busy_ns / max(1, self.last_end_ns - self.first_launch_ns)

    def to_device(self, array: IntArray) -> IntArray:
        return array

    def launch(self, batch: ForwardBatch) -> SimForward:
        """Queues one forward behind those before it and returns at once.

        Input ids that stand for future tokens are the caller's to fill in, from `device_token_ids`.
        """
        if batch.mode is ForwardMode.DECODE:
            duration_ns = self._decode_ns
            context_hash = self._decode(batch)
        else:
            duration_ns = round(self._prefill_ns_per_token * len(batch.input_ids))
            context_hash = self._extend(batch)
        result = ForwardResult(self._next_tokens(context_hash, batch))
        if batch.top_logprobs_nums is not None:
            result.logprobs = _certain(result.next_token_ids, batch.top_logprobs_nums)
        return SimForward(result, self._occupy(duration_ns))

    def _occupy(self, duration_ns: int) -> int:
        """When a forward launched now ends, on the monotonic clock."""
        now_ns = time.monotonic_ns()
        if not self.launches:
            self.first_launch_ns = now_ns
        self.launches += 1
        self.busy_ns += duration_ns
        begin_ns = max(now_ns, self.last_end_ns)
        self.last_end_ns = begin_ns + duration_ns
        if duration_ns:
            self._trace.span("forward", begin_ns, self.last_end_ns)
        return self.last_end_ns

    def _decode(self, batch: ForwardBatch) -> UInt64Array:
        previous_slots = batch.req_to_token[batch.req_pool_indices, batch.seq_lens - 2]
        context_hash = self._token_factor[batch.input_ids]
        context_hash *= self._position_factor[batch.positions]
        context_hash += self._slot_hash[previous_slots]
        self._slot_hash[batch.out_cache_loc] = context_hash
        return context_hash

    def _extend(self, batch: ForwardBatch) -> UInt64Array:
        terms = self._token_factor[batch.input_ids] * self._position_factor[batch.positions]
        ends = np.cumsum(batch.extend_lens)
        starts = ends - batch.extend_lens
        prefix_lens = batch.seq_lens - batch.extend_lens
        # One by one, since a prefix may end in a slot that an earlier request of the batch writes.
        for row, (start, end, prefix_len) in enumerate(zip(starts, ends, prefix_lens, strict=True)):
            if prefix_len:
                last_slot = batch.req_to_token[batch.req_pool_indices[row], prefix_len - 1]
                terms[start : start + 1] += self._slot_hash[last_slot]
            np.cumsum(terms[start:end], out=terms[start:end])
            self._slot_hash[batch.out_cache_loc[start:end]] = terms[start:end]
        context_hash: UInt64Array = terms[ends - 1]
        return context_hash

    def _next_tokens(self, context_hash: UInt64Array, batch: ForwardBatch) -> IntArray:
        key = context_hash
        if not batch.sampling.all_greedy:
            key = key ^ np.where(batch.sampling.greedy, np.uint64(0), mix64(batch.sampling.seed))
        # The upper half as a fraction of the number of ids: an even choice without a division.
        token_ids: IntArray = self._allowed_ids[((key >> _HALF) * self._num_allowed) >> _HALF]
        return token_ids


def _certain(token_ids: IntArray, top_nums: list[int | None]) -> list[TokenLogprob | None]:
    """Log-probabilities of a model that is always sure."""
    return [
        None if top_num is None else TokenLogprob(0.0, ((token, 0.0),) if top_num else ())
        for token, top_num in zip(token_ids.tolist(), top_nums, strict=True)
    ]


def _sleep_until(end_ns: int) -> None:
    """Sleeps until `end_ns` on the monotonic clock; not at all if that has passed."""
    while (left_ns := end_ns - time.monotonic_ns()) > 0:
        time.sleep(max(0, left_ns - WAKE_UP_NS) / 1e9)
