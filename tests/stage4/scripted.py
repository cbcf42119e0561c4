"""A `Scheduler` inside the test: requests come by script, answers are collected, no process and no socket."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.executor.forward_batch import ForwardResult
from shared.messages import (
    BatchTokenIDOut,
    FinishReason,
    PortArgs,
    SamplingParams,
    SchedulerInput,
    TokenizedGenerateReqInput,
)
from shared.scheduling.batch import ScheduleBatch
from shared.server_args import ServerArgs
from shared.weights.prepare import prepare_model
from stage4_peer_schedulers.scheduler import Scheduler

NO_PORTS = PortArgs("", "", "", "", b"")


class Finished(Exception):
    """The script is at its end and the scheduler at rest."""


@dataclass
class Answer:
    """What one request was sent, message by message."""

    chunks: list[list[int]] = field(default_factory=list)
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


class Answers(dict[str, Answer]):
    """Stands in for the socket to the detokenizer."""

    def send(self, data: bytes) -> None:
        message = pickle.loads(data)
        if not isinstance(message, BatchTokenIDOut):
            return
        assert len(set(message.rids)) == len(message.rids)
        for i, rid in enumerate(message.rids):
            answer = self.setdefault(rid, Answer())
            assert answer.finish is None, f"{rid} was sent something after its finish"
            assert all(token >= 0 for token in message.new_ids[i]), "a placeholder was sent"
            answer.chunks.append(message.new_ids[i])
            answer.finish = message.finish_reasons[i]
            answer.prompt_tokens = message.prompt_tokens[i]
            answer.completion_tokens = message.completion_tokens[i]
            answer.cached_tokens = message.cached_tokens[i]
            assert answer.completion_tokens == len(answer.ids)


class ScriptedScheduler(Scheduler):
    """`script` says what arrives at which turn of the loop."""

    def __init__(self, script: dict[int, list[SchedulerInput]], **flags: Any) -> None:
        self.answers = Answers()
        self.in_flight: list[int] = []
        """Batches launched and not yet processed, each time a result is looked at."""
        self._script = dict(script)
        self._turn = -1
        folder = str(prepare_model("tiny-random", show_progress=False))
        super().__init__(ServerArgs(**{"model_path": folder, **flags}), NO_PORTS, 0, 0, None)

    def _open_sockets(self, port_args: PortArgs, dp_rank: int | None) -> None:
        self._send_to_detokenizer = self.answers  # type: ignore[assignment]

    def recv_requests(self) -> list[SchedulerInput]:
        if not self._script and self.core.idle:
            raise Finished
        self._turn += 1
        return self._script.pop(self._turn, [])

    def process_batch_result(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        self.in_flight.append(len(self.core.inflight))
        super().process_batch_result(batch, result)

    def run(self) -> Answers:
        """Runs the loop to its end, and checks that every slot has come back."""
        try:
            if self.enable_overlap:
                self.event_loop_overlap()
            else:
                self.event_loop_normal()
        except Finished:
            pass
        assert self.core.memory.leak() is None
        assert self.core.leaks == 0
        assert all(answer.finish is not None for answer in self.answers.values())
        return self.answers


def request(rid: str, prompt: list[int], *, stream: bool = True, **params: Any) -> TokenizedGenerateReqInput:
    """Greedy unless told otherwise."""
    settings = SamplingParams(**{"temperature": 0.0, **params})
    return TokenizedGenerateReqInput(rid, np.array(prompt, dtype=np.int64), settings, stream)


def run(script: dict[int, list[SchedulerInput]], *, overlap: bool, **flags: Any) -> Answers:
    return ScriptedScheduler(script, disable_overlap_schedule=not overlap, **flags).run()
