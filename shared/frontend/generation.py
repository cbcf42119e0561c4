"""Live requests: what the engine has sent and the client has not yet taken.

A client that reads slowly finds everything since its last read in one `Output`, so what a request can hold is
bounded by its own output, and no queue of chunks exists.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from shared.frontend.errors import error_of_finish
from shared.messages import FinishReason, TokenizedGenerateReqInput, TokenLogprob


@dataclass
class Output:
    """What a request gained since the last one; the counts are totals."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, newer: Output) -> None:
        self.text += newer.text
        self.ids += newer.ids
        self.logprobs += newer.logprobs
        self.finish_reason = newer.finish_reason
        self.prompt_tokens = newer.prompt_tokens
        self.completion_tokens = newer.completion_tokens
        self.cached_tokens = newer.cached_tokens


@dataclass(eq=False)
class Generation:
    """One live request.  `index` is its place in its group; times are CLOCK_MONOTONIC seconds.

    `counts_prompt` is False for all but the first choice of a prompt.
    """

    request: TokenizedGenerateReqInput
    index: int
    group: GenerationGroup
    counts_prompt: bool
    is_probe: bool
    created_s: float
    last_output_s: float | None = None
    unread: Output | None = None
    is_finished: bool = False

    def add(self, output: Output) -> None:
        self.is_finished = output.finish_reason is not None
        if self.group.is_closed:
            return
        if self.unread is None:
            self.unread = output
            self.group.notify(self)
        else:
            self.unread.add(output)


class GenerationGroup:
    """The requests of one HTTP request.  On leaving its `with` block, those that still run are aborted."""

    def __init__(
        self,
        requests: Sequence[TokenizedGenerateReqInput],
        choices_per_prompt: int,
        abort: Callable[[Generation], None],
        created_s: float,
        is_probe: bool,
    ) -> None:
        self.generations = [
            Generation(request, index, self, index % choices_per_prompt == 0, is_probe, created_s)
            for index, request in enumerate(requests)
        ]
        self.is_closed = False
        self._abort = abort
        self._ready: deque[Generation] = deque()
        self._has_ready = asyncio.Event()

    def notify(self, generation: Generation) -> None:
        self._ready.append(generation)
        self._has_ready.set()

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """Each request's index and news, until all are finished.  ApiError where the engine failed one."""
        unfinished = len(self.generations)
        while unfinished:
            while not self._ready:
                self._has_ready.clear()
                await self._has_ready.wait()
            generation = self._ready.popleft()
            output, generation.unread = generation.unread, None
            assert output is not None
            error = error_of_finish(output.finish_reason)
            if error:
                raise error
            unfinished -= output.finish_reason is not None
            yield generation.index, output

    async def results(self) -> list[Output]:
        """Each request's whole output."""
        totals = [Output() for _ in self.generations]
        async for index, output in self.outputs():
            totals[index].add(output)
        return totals

    def close(self) -> None:
        """Aborts what still runs.  May be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        for generation in self.generations:
            generation.unread = None
            if not generation.is_finished:
                self._abort(generation)

    def __enter__(self) -> GenerationGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
