"""A middle corner and detokenizer without a model: real messages, made-up tokens, in one thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from shared.detokenizer import Detokenizer
from shared.incremental_detokenizer import StopFinder, TextDecoder
from shared.messages import (
    AbortReq,
    BatchTokenIDOut,
    FinishReason,
    FlushCacheOut,
    FlushCacheReq,
    GetInternalStateOut,
    GetInternalStateReq,
    PortArgs,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenLogprob,
)

EOS = 1


@dataclass
class Live:
    request: TokenizedGenerateReqInput
    finder: StopFinder | None
    ids: list[int] = field(default_factory=list)


class FakeEngine:
    """Runs up to `max_running` requests, one token each per step of `step_s`, in order of arrival.

    `next_token(prompt ids, output ids, seed)` chooses tokens.  `received` is all that came in; while `hung`
    is set, nothing is read or answered.
    """

    def __init__(
        self,
        ports: PortArgs,
        decoder: TextDecoder,
        next_token: Callable[[list[int], list[int], int], int],
        *,
        max_running: int,
        capacity: int,
        step_s: float = 0.001,
    ) -> None:
        self.next_token = next_token
        self.step_s = step_s
        self.received: list[object] = []
        self.hung = threading.Event()
        self._decoder = decoder
        self._max_running, self._capacity = max_running, capacity
        self._waiting: deque[Live] = deque()
        self._running: list[Live] = []
        self._reported = (-1, -1)
        self._detokenizer = Detokenizer(decoder)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._inbox.bind(ports.scheduler_input_ipc_name)
        self._outbox.connect(ports.tokenizer_ipc_name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._inbox.close()
        self._outbox.close()
        self._context.term()

    def requests(self) -> list[TokenizedGenerateReqInput]:
        return [message for message in self.received if isinstance(message, TokenizedGenerateReqInput)]

    def counts(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting)

    def open_texts(self) -> int:
        return len(self._detokenizer)

    def _loop(self) -> None:
        while not self._stop.is_set():
            if self.hung.is_set():
                time.sleep(0.005)
                continue
            while self._inbox.poll(0 if self._running else 2) and not self.hung.is_set():
                self._take(self._inbox.recv_pyobj())
            while self._waiting and len(self._running) < self._max_running:
                self._running.append(self._waiting.popleft())
            self._report()
            if self._running:
                self._step()
                self._report()
                time.sleep(self.step_s)

    def _take(self, message: object) -> None:
        self.received.append(message)
        if isinstance(message, TokenizedGenerateReqInput):
            params = message.sampling_params
            finder = None
            if params.stop:
                finder = StopFinder(self._decoder, params.stop, params.skip_special_tokens)
            self._waiting.append(Live(message, finder))
        elif isinstance(message, AbortReq):
            gone = [one for one in (*self._running, *self._waiting) if message.rid in (None, one.request.rid)]
            self._running = [one for one in self._running if one not in gone]
            self._waiting = deque(one for one in self._waiting if one not in gone)
            self._send([(one, [], FinishReason("abort", message="aborted")) for one in gone])
        elif isinstance(message, FlushCacheReq):
            self._outbox.send_pyobj(FlushCacheOut(message.id, 0, not self._running, "running"))
        elif isinstance(message, GetInternalStateReq):
            self._outbox.send_pyobj(GetInternalStateOut(message.id, self._stats()))

    def _step(self) -> None:
        news = []
        for one in self._running:
            request, params = one.request, one.request.sampling_params
            token = self.next_token(request.input_ids.tolist(), one.ids, params.seed)
            one.ids.append(token)
            reason = None
            stop = one.finder.push(token) if one.finder else None
            if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
                reason = FinishReason("stop", matched=token)
            elif stop is not None:
                reason = FinishReason("stop", matched=stop)
            elif len(one.ids) >= params.max_new_tokens:
                reason = FinishReason("length")
            news.append((one, [token], reason))
        self._running = [one for one, _, reason in news if reason is None]
        self._send(news)

    def _send(self, news: list[tuple[Live, list[int], FinishReason | None]]) -> None:
        if not news:
            return
        batch = BatchTokenIDOut(
            rids=[one.request.rid for one, _, _ in news],
            new_ids=[ids for _, ids, _ in news],
            finish_reasons=[reason for _, _, reason in news],
            prompt_tokens=[len(one.request.input_ids) for one, _, _ in news],
            completion_tokens=[len(one.ids) for one, _, _ in news],
            cached_tokens=[0 for _ in news],
            sampling_params=[one.request.sampling_params for one, _, _ in news],
            logprobs=[
                [TokenLogprob(-0.5, ((token, -0.5), (EOS, -2.0))) for token in ids]
                if one.request.return_logprob
                else None
                for one, ids, _ in news
            ],
        )
        self._outbox.send_pyobj(self._detokenizer.process(batch))

    def _stats(self) -> SchedulerStats:
        running, waiting = self.counts()
        used = sum(len(one.request.input_ids) + len(one.ids) for one in self._running)
        return SchedulerStats(
            dp_rank=0,
            running=running,
            waiting=waiting,
            free_tokens=self._capacity - used,
            evictable_tokens=0,
            protected_tokens=0,
            capacity_tokens=self._capacity,
            free_request_slots=self._max_running - running,
            max_running_requests=self._max_running,
            forwards=0,
            retractions=0,
            leaks=0,
        )

    def _report(self) -> None:
        if self._reported != self.counts():
            self._reported = self.counts()
            self._outbox.send_pyobj(self._stats())
