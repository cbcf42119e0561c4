"""The detokenizer process: `BatchTokenIDOut` in, `BatchStrOut` out; everything else passes through.

middle corner --PUSH--> DetokenizerManager --PUSH--> TokenizerManager
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection

import zmq

from shared import pyobj, trace
from shared.incremental_detokenizer import StopTrimmer, TextDecoder
from shared.messages import BatchStrOut, BatchTokenIDOut, FinishReason, PortArgs, SamplingParams
from shared.server_args import ServerArgs
from shared.weights.tokenizer import load_backend


class DetokenizedRequest:
    """The text of one request, from its first token to its finish reason."""

    def __init__(self, decoder: TextDecoder, params: SamplingParams) -> None:
        self._stream = decoder.stream(params.skip_special_tokens)
        self._keeps_stop = params.no_stop_trim
        self._trimmer = StopTrimmer(() if params.no_stop_trim else params.stop)

    def push(self, ids: list[int], finish_reason: FinishReason | None) -> str:
        """The text that `ids` add.  A matched stop token is not part of it, unless `no_stop_trim` is set."""
        if finish_reason is None:
            return self._trimmer.push(self._stream.push(ids), final=False)
        matched = finish_reason.matched
        if isinstance(matched, int) and not self._keeps_stop and ids and ids[-1] == matched:
            ids = ids[:-1]
        return self._trimmer.push(self._stream.push(ids) + self._stream.tail(), final=True)


class Detokenizer:
    """The requests that have tokens out and are not finished."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._requests: dict[str, DetokenizedRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def process(self, batch: BatchTokenIDOut) -> BatchStrOut:
        texts = [
            self._push(rid, ids, finish_reason, params)
            for rid, ids, finish_reason, params in zip(
                batch.rids, batch.new_ids, batch.finish_reasons, batch.sampling_params, strict=True
            )
        ]
        return BatchStrOut(
            rids=batch.rids,
            texts=texts,
            new_ids=batch.new_ids,
            finish_reasons=batch.finish_reasons,
            prompt_tokens=batch.prompt_tokens,
            completion_tokens=batch.completion_tokens,
            cached_tokens=batch.cached_tokens,
            logprobs=batch.logprobs,
        )

    def _push(self, rid: str, ids: list[int], reason: FinishReason | None, params: SamplingParams) -> str:
        request = self._requests.get(rid)
        if request is None:
            request = self._requests[rid] = DetokenizedRequest(self._decoder, params)
        if reason is not None:
            del self._requests[rid]
        return request.push(ids, reason)


class DetokenizerManager:
    """The sockets of the process, and its loop."""

    def __init__(self, detokenizer: Detokenizer, port_args: PortArgs) -> None:
        self._detokenizer = detokenizer
        self._trace = trace.track()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._from_scheduler = context.socket(zmq.PULL)
        self._to_tokenizer = context.socket(zmq.PUSH)
        for socket in (self._from_scheduler, self._to_tokenizer):
            socket.set_hwm(0)
        self._from_scheduler.bind(port_args.detokenizer_ipc_name)
        self._to_tokenizer.connect(port_args.tokenizer_ipc_name)

    def event_loop(self) -> None:
        while True:
            data = self._from_scheduler.recv()
            self._trace.lap("wait", len(data))
            message = pickle.loads(data)
            self._trace.lap_out("deserialize", (message,))
            if isinstance(message, BatchTokenIDOut):
                message = self._detokenizer.process(message)
                self._trace.lap_out("detokenize", (message,))
            pyobj.send(self._to_tokenizer, message, self._trace)
            self._trace.end_step(busy=True)


def run_detokenizer_process(server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection) -> None:
    """Process entry.  Reports `{"status": "ready"}` once and then runs until it is ended."""
    decoder = TextDecoder(load_backend(server_args.model_path))
    manager = DetokenizerManager(Detokenizer(decoder), port_args)
    pipe_writer.send({"status": "ready"})
    manager.event_loop()
