"""Collects what a step has to tell the detokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import (
    BatchTokenIDOut,
    FinishReason,
    SchedulerOutput,
    TokenizedGenerateReqInput,
)
from shared.scheduling.req import Req


class OutputCollector:
    """Builds one `BatchTokenIDOut` a forward, in batch order, and keeps other messages in between."""

    def __init__(self, stream_interval: int) -> None:
        self._interval = stream_interval
        self._messages: list[SchedulerOutput] = []

    def add(self, message: SchedulerOutput) -> None:
        self._messages.append(message)

    def add_tokens(self, reqs: list[Req]) -> None:
        """Those of `reqs` that have something to send: a finish, or enough new tokens of a stream."""
        interval = self._interval
        due = [
            req
            for req in reqs
            if req.finish is not None
            or (req.stream and (len(req.output_ids) - req.sent_len >= interval or req.sent_len == 0))
        ]
        if due:
            self._messages.append(_message(due))

    @property
    def pending(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._messages)

    def take(self) -> list[SchedulerOutput]:
        """Everything since the last call."""
        messages, self._messages = self._messages, []
        return messages


def _message(reqs: list[Req]) -> BatchTokenIDOut:
    """What `reqs` have that is not sent yet, marked as sent."""
    message = BatchTokenIDOut([], [], [], [], [], [], [], [])
    rids, new_ids, finish_reasons, prompt_tokens, completion_tokens, cached_tokens, sampling_params, logprobs = message
    for req in reqs:
        output_ids, sent = req.output_ids, req.sent_len
        req.sent_len = len(output_ids)
        rids.append(req.rid)
        new_ids.append(output_ids[sent:])
        finish_reasons.append(req.finish)
        prompt_tokens.append(len(req.prompt_ids))
        completion_tokens.append(len(output_ids))
        cached_tokens.append(req.cached_tokens or 0)
        sampling_params.append(req.params)
        logprobs.append(req.logprobs[sent:] if req.return_logprob else None)
    return message


def finished_rids(outputs: Sequence[SchedulerOutput]) -> list[str]:
    """The requests whose last tokens are in `outputs`."""
    return [
        rid
        for output in outputs
        if isinstance(output, BatchTokenIDOut)
        for rid, reason in zip(output.rids, output.finish_reasons, strict=True)
        if reason is not None
    ]


def end_unscheduled(
    reqs: Sequence[TokenizedGenerateReqInput], message: str, status: int | None = None
) -> BatchTokenIDOut:
    """Ends requests that no scheduler has, or has any more: for whoever stands before the schedulers."""
    n = len(reqs)
    return BatchTokenIDOut(
        rids=[req.rid for req in reqs],
        new_ids=[[] for _ in reqs],
        finish_reasons=[FinishReason("abort", message=message, status=status)] * n,
        prompt_tokens=[len(req.input_ids) for req in reqs],
        completion_tokens=[0] * n,
        cached_tokens=[0] * n,
        sampling_params=[req.sampling_params for req in reqs],
        logprobs=[None] * n,
    )
