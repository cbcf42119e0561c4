"""The main process's side of the triangle: requests to the middle corner, outputs from the detokenizer."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from shared import pyobj, trace
from shared.frontend.errors import ApiError
from shared.frontend.generation import Generation, GenerationGroup, Output
from shared.frontend.limits import Limits
from shared.frontend.metrics import Metrics
from shared.frontend.prompts import PromptEncoder
from shared.messages import (
    AbortReq,
    BatchStrOut,
    FinishReason,
    FlushCacheOut,
    FlushCacheReq,
    FrontendInput,
    GetInternalStateOut,
    GetInternalStateReq,
    PortArgs,
    SchedulerInput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from shared.server_args import ServerArgs
from shared.weights.tokenizer import load_tokenizer

_MESSAGES_PER_TURN = 16
"""Messages taken before other tasks of the event loop get their turn."""

logger = logging.getLogger(__name__)

R = TypeVar("R", FlushCacheOut, GetInternalStateOut)


class TokenizerManager:
    """Owns the state of every live request.

    All methods are for the event loop that ran `start`; from elsewhere: `loop.call_soon_threadsafe`.
    """

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, limits: Limits) -> None:
        self.server_args = server_args
        self.limits = limits
        self.metrics = Metrics(server_args.model_name, limits.dp_size)
        self.stats: dict[int, SchedulerStats] = {}
        self.failure: str | None = None
        tokenizer = load_tokenizer(server_args.model_path, server_args.chat_template)
        self.prompts = PromptEncoder(tokenizer, limits)
        self._port_args = port_args
        self._trace = trace.track()
        self._live: dict[str, Generation] = {}
        self._replies: dict[str, asyncio.Queue[Any]] = {}
        self._receiving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the sockets and begins to receive."""
        self._context = zmq.asyncio.Context()
        self._from_detokenizer = self._context.socket(zmq.PULL)
        # Not an asyncio socket: messages leave in the order of the calls, and an abort also during a cancel.
        self._to_scheduler = zmq.Socket(zmq.Context.shadow(self._context.underlying), zmq.PUSH)
        for socket in (self._from_detokenizer, self._to_scheduler):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._from_detokenizer.bind(self._port_args.tokenizer_ipc_name)
        self._to_scheduler.connect(self._port_args.scheduler_input_ipc_name)
        self._receiving = asyncio.create_task(self._receive())

    async def close(self) -> None:
        """Ends what is open and closes the sockets."""
        self.fail_all("the server is shutting down")
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
            self._to_scheduler.close()
            self._from_detokenizer.close()
            self._context.term()

    # Requests

    def open(
        self,
        requests: Sequence[TokenizedGenerateReqInput],
        *,
        choices_per_prompt: int = 1,
        is_probe: bool = False,
    ) -> GenerationGroup:
        """Sends `requests`, all or none; of each `choices_per_prompt` in a row, the prompt is the same.

        Raises ApiError 409 for an id that is live or comes twice, 503 for a full queue or a lost engine.
        """
        self._check_ids(requests)
        self.check_room(len(requests))
        now = time.monotonic()
        group = GenerationGroup(requests, choices_per_prompt, self._abort_generation, now, is_probe)
        for generation in group.generations:
            self._live[generation.request.rid] = generation
            self._send(generation.request)
        return group

    def _check_ids(self, requests: Sequence[TokenizedGenerateReqInput]) -> None:
        if self.failure is not None:
            raise ApiError(503, self.failure, code="engine_lost")
        seen: set[str] = set()
        for request in requests:
            if request.rid in seen:
                raise ApiError(400, f"rid: {request.rid!a} comes twice", param="rid")
            if request.rid in self._live:
                raise ApiError(409, f"rid: {request.rid!a} is a request that still runs", param="rid")
            seen.add(request.rid)

    def check_room(self, count: int) -> None:
        """Raises ApiError 503 if `count` more requests would overfill the queue, 400 if they always would."""
        limit = self.server_args.max_queued_requests
        places = self.limits.max_running_requests * self.limits.dp_size
        if count > limit + places:
            raise ApiError(
                400,
                f"{count} requests in one are too many: {places} can run (--max-running-requests) and "
                f"{limit} can wait (--max-queued-requests)",
            )
        if self._waiting_with(count) > limit:
            raise ApiError(
                503,
                f"the queue is full: --max-queued-requests is {limit}",
                code="queue_full",
                retry_after_s=1,
            )

    def _waiting_with(self, count: int) -> int:
        """Requests without a place in a batch, if `count` more came.

        The schedulers' last reports say who runs and who waits.  Requests sent since then take the free
        places, unless others wait for them.
        """
        reports = self.stats.values()
        waiting = sum(stats.waiting for stats in reports)
        running = sum(stats.running for stats in reports)
        places = 0 if waiting else self.limits.max_running_requests * self.limits.dp_size - running
        unreported = max(0, len(self._live) - running - waiting)
        return waiting + max(0, unreported + count - places)

    @property
    def live_requests(self) -> int:
        return len(self._live)

    def has_work(self) -> bool:
        """Whether anything but a health probe runs or waits."""
        return any(not generation.is_probe for generation in self._live.values())

    def has_probe(self) -> bool:
        return any(generation.is_probe for generation in self._live.values())

    def abort(self, rid: str | None) -> None:
        """Ends the request `rid`; with None, all of them.  An unknown id is ignored."""
        if rid is None:
            self._send(AbortReq(None))
        elif rid in self._live:
            self._send(AbortReq(rid))

    def _abort_generation(self, generation: Generation) -> None:
        """The request stays live, and its id taken, until the scheduler says that it is over."""
        if self._live.get(generation.request.rid) is generation:
            self._send(AbortReq(generation.request.rid))

    def fail_all(self, message: str) -> None:
        """Ends every open request with an error, and refuses new ones: the engine is lost."""
        self.failure = message
        reason = FinishReason("abort", message=message, status=503)
        for generation in list(self._live.values()):
            self._finish(generation, Output(finish_reason=reason))
        self.stats.clear()
        self.metrics.on_failure(self.limits.dp_size)
        for queue in self._replies.values():
            queue.put_nowait(None)

    # Questions to every replica

    async def flush_cache(self, timeout_s: float = 10.0) -> list[FlushCacheOut]:
        """Every replica's answer.  Raises ApiError 503 when one stays away for `timeout_s`."""
        return await self._ask(FlushCacheReq(uuid.uuid4().hex), FlushCacheOut, timeout_s)

    async def internal_state(self, timeout_s: float = 2.0) -> list[SchedulerStats]:
        """Every replica's state, in rank order.  Raises ApiError 503 when one stays away for `timeout_s`."""
        replies = await self._ask(GetInternalStateReq(uuid.uuid4().hex), GetInternalStateOut, timeout_s)
        return sorted((reply.stats for reply in replies), key=lambda stats: stats.dp_rank)

    def last_stats(self) -> list[SchedulerStats]:
        """What each replica last reported, in rank order."""
        return [self.stats[dp_rank] for dp_rank in sorted(self.stats)]

    async def _ask(self, question: FlushCacheReq | GetInternalStateReq, answer: type[R], timeout_s: float) -> list[R]:
        if self.failure is not None:
            raise ApiError(503, self.failure, code="engine_lost")
        queue = self._replies[question.id] = asyncio.Queue()
        try:
            self._send(question)
            replies = [await asyncio.wait_for(queue.get(), timeout_s) for _ in range(self.limits.dp_size)]
        except asyncio.TimeoutError:
            raise ApiError(503, f"no answer from the scheduler within {timeout_s:g} s: it is busy") from None
        finally:
            del self._replies[question.id]
        if None in replies:
            raise ApiError(503, self.failure or "", code="engine_lost")
        return replies

    # Messages

    def _send(self, message: SchedulerInput) -> None:
        if self.failure is None:
            start_ns = self._trace.now()
            data = pickle.dumps(message)
            sending_ns = self._trace.now()
            self._trace.span("serialize", start_ns, sending_ns)
            self._to_scheduler.send(data, zmq.NOBLOCK)
            self._trace.span("send", sending_ns, messages=(message,), num_bytes=len(data))

    async def _receive(self) -> None:
        taken = 0
        try:
            while True:
                message = await pyobj.recv_async(self._from_detokenizer, self._trace)
                start_ns = self._trace.now()
                self._process(message)
                self._trace.span("hand out", start_ns, messages=(message,))
                taken += 1
                if taken % _MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
        except Exception:  # without this every request would wait for ever
            logger.exception("outputs can no longer be received")
            self.fail_all("the server can no longer receive outputs; its log has the traceback")

    def _process(self, message: FrontendInput) -> None:
        if isinstance(message, BatchStrOut):
            self._process_batch(message)
        elif isinstance(message, SchedulerStats):
            self._take_stats(message)
        else:
            if isinstance(message, GetInternalStateOut):
                self._take_stats(message.stats)
            if message.id in self._replies:
                self._replies[message.id].put_nowait(message)

    def _take_stats(self, stats: SchedulerStats) -> None:
        self.stats[stats.dp_rank] = stats
        self.metrics.on_stats(stats)

    def _process_batch(self, batch: BatchStrOut) -> None:
        now = time.monotonic()
        for i, rid in enumerate(batch.rids):
            generation = self._live.get(rid)
            if generation is None:
                continue
            output = Output(
                text=batch.texts[i],
                ids=batch.new_ids[i],
                logprobs=batch.logprobs[i] or [],
                finish_reason=batch.finish_reasons[i],
                prompt_tokens=batch.prompt_tokens[i],
                completion_tokens=batch.completion_tokens[i],
                cached_tokens=batch.cached_tokens[i],
            )
            if output.ids and generation.request.stream:
                self.metrics.on_tokens(now, generation.created_s, generation.last_output_s, len(output.ids))
                generation.last_output_s = now
            if output.finish_reason is None:
                generation.add(output)
            else:
                self._finish(generation, output)

    def _finish(self, generation: Generation, output: Output) -> None:
        del self._live[generation.request.rid]
        reason = output.finish_reason
        if reason is not None and not generation.is_probe:
            seconds = time.monotonic() - generation.created_s
            self.metrics.on_finish(reason, seconds, output, counts_prompt=generation.counts_prompt)
        generation.add(output)
