"""A model that is a function of the whole context, read back slot by slot: any wrong slot changes its output."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from shared.executor.forward_batch import ForwardBatch, ForwardResult
from shared.messages import AbortReq, BatchTokenIDOut, FinishReason, SamplingParams, TokenizedGenerateReqInput
from shared.scheduling.batch import ScheduleBatch
from shared.scheduling.config import SchedulerConfig
from shared.scheduling.core import SchedulerCore

VOCAB = 50
EOS = 7


def next_token(context: Sequence[int]) -> int:
    digest = hashlib.blake2b(np.array(context, dtype=np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def reference(prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str]:
    """Output ids and finish type of a plain loop."""
    context, out = list(prompt), []
    while True:
        token = next_token(context)
        context.append(token)
        out.append(token)
        is_stop = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if is_stop and len(out) > params.min_new_tokens:
            return out, "stop"
        if find_stop(out, params.stop) is not None:
            return out, "stop"
        if len(out) >= params.max_new_tokens:
            return out, "length"


def find_stop(ids: Sequence[int], stops: tuple[str, ...]) -> str | None:
    """A stop string is here a text of ids, "3,14"."""
    text = ",".join(map(str, ids))
    return next((stop for stop in stops if text == stop or text.endswith("," + stop)), None)


class FakeStopFinder:
    def __init__(self, params: SamplingParams) -> None:
        self._ids: list[int] = []
        self._stops = params.stop

    def push(self, token_id: int) -> str | None:
        self._ids.append(token_id)
        return find_stop(self._ids, self._stops)


class FakeRunner:
    """Keeps one token per slot, and the future-token map that overlap needs."""

    def __init__(self, capacity: int) -> None:
        self.kv = np.full(capacity, -1, dtype=np.int64)
        self.cells: dict[int, int] = {}
        self.fail_rids: set[str] = set()

    def run(self, batch: ForwardBatch, future_base: int) -> ForwardResult:
        ids = batch.input_ids.copy()
        for i in np.flatnonzero(ids < 0):
            ids[i] = self.cells[int(-ids[i])]
        assert len(set(batch.out_cache_loc.tolist())) == len(batch.out_cache_loc), "a slot is written twice"
        self.kv[batch.out_cache_loc] = ids
        tokens = np.zeros(len(batch.rids), dtype=np.int64)
        failed = np.zeros(len(batch.rids), dtype=np.bool_)
        for i, (row, n) in enumerate(zip(batch.req_pool_indices, batch.seq_lens, strict=True)):
            context = self.kv[batch.req_to_token[row, :n]]
            assert (context >= 0).all()
            tokens[i] = next_token(context.tolist())
            failed[i] = batch.rids[i] in self.fail_rids
            self.cells[future_base + i] = int(tokens[i])
        return ForwardResult(tokens, failed=failed if failed.any() else None)


def _rows(batch: ForwardBatch) -> list[np.ndarray]:
    lens = zip(batch.req_pool_indices, batch.seq_lens, strict=True)
    return [batch.req_to_token[row, :n].copy() for row, n in lens]


class Driver:
    """Runs a core as a stage would, with or without overlap, and keeps what each request was sent."""

    def __init__(self, **config: object) -> None:
        defaults: dict[str, object] = {
            "max_total_num_tokens": 200,
            "max_running_requests": 8,
            "context_length": 100,
            "vocab_size": VOCAB,
            "eos_token_ids": (EOS,),
            "make_stop_finder": FakeStopFinder,
        }
        self.core = SchedulerCore(SchedulerConfig(**{**defaults, **config}))  # type: ignore[arg-type]
        self.runner = FakeRunner(self.core.memory.capacity)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.log: list[tuple[object, ...]] = []
        self._pending: tuple[ScheduleBatch, list[np.ndarray]] | None = None

    def send(self, rid: str, prompt: Sequence[int], stream: bool = True, **params: object) -> None:
        self.core.process_input_requests(
            [
                TokenizedGenerateReqInput(
                    rid=rid,
                    input_ids=np.array(prompt, dtype=np.int64),
                    sampling_params=SamplingParams(temperature=0.0, **params),  # type: ignore[arg-type]
                    stream=stream,
                )
            ]
        )

    def abort(self, rid: str | None) -> None:
        self.core.process_input_requests([AbortReq(rid)])

    def turn(self) -> bool:
        """One round of the loop; False when there was nothing to do.

        Under overlap a batch is executed as late as it can be, just before its result is needed: until then
        the scheduler must leave alone what it uses.
        """
        core = self.core
        launched = core.get_next_batch_to_run()
        if launched is not None:
            forward = launched.forward
            self.log.append((forward.mode, *forward.rids, *forward.out_cache_loc.tolist()))
        due = launched
        if core.config.overlap:
            due, snapshot = self._pending or (None, [])
            self._pending = None if launched is None else (launched, _rows(launched.forward))
            if due is not None:
                now = _rows(due.forward)
                assert all(np.array_equal(a, b) for a, b in zip(snapshot, now, strict=True))
        if due is not None:
            core.process_batch_result(due, self.runner.run(due.forward, due.future_base))
        self._collect()
        return launched is not None or not core.idle

    def run(self, turns: int = 5000) -> None:
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError("the scheduler does not come to rest")

    def _collect(self) -> None:
        for message in self.core.take_outputs():
            if not isinstance(message, BatchTokenIDOut):
                continue
            for i, rid in enumerate(message.rids):
                assert rid not in self.finish, "something was sent after the finish"
                self.tokens.setdefault(rid, []).extend(message.new_ids[i])
                self.cached[rid] = message.cached_tokens[i]
                assert message.completion_tokens[i] == len(self.tokens[rid])
                reason = message.finish_reasons[i]
                if reason is not None:
                    self.finish[rid] = reason

    def assert_whole(self) -> None:
        """The pool is whole: nothing running, every slot and row accounted for."""
        assert self.core.idle
        assert self.core.memory.leak() is None, self.core.memory.leak()
        assert self.core.leaks == 0
        tree = self.core.memory.tree
        free = self.core.memory.slots.alloc(self.core.memory.slots.free_count)
        self.core.memory.slots.free(free)
        owned = list(free)
        if tree is not None:
            stack = [tree.root]
            while stack:
                node = stack.pop()
                owned.extend(node.value)
                stack.extend(node.children.values())
        assert sorted(owned) == list(range(self.core.memory.capacity)), "a slot is lost or owned twice"
