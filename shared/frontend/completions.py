"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shared.frontend.errors import invalid, shown
from shared.frontend.generation import GenerationGroup
from shared.frontend.http import EventStream, dumps, json_response, read_json, respond
from shared.frontend.logprobs import LogprobFormatter
from shared.frontend.openai_common import UsageCounter, check_model, choice_requests, choice_rids, finish_name
from shared.frontend.prompts import Prompt, PromptEncoder
from shared.frontend.protocol import CompletionRequest, parse
from shared.frontend.tokenizer_manager import TokenizerManager

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this route."""


async def parse_prompts(encoder: PromptEncoder, given: Any, rids: Sequence[str]) -> list[Prompt]:
    """A string, a list of strings, token ids (one prompt), or a list of lists of token ids."""
    if isinstance(given, str):
        return await encoder.from_texts([given], ["prompt"], rids)
    if not isinstance(given, list):
        raise invalid("prompt", f"must be a string, token ids, or a list of either (got {shown(given)})")
    params = [f"prompt[{place}]" for place in range(len(given))]
    if given and all(isinstance(part, str) for part in given):
        return await encoder.from_texts(given, params, rids)
    if given and all(isinstance(part, list) for part in given):
        return await encoder.from_ids(given, params)
    return await encoder.from_ids([given], ["prompt"])


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], str | list)


class Completions:
    """Choice `prompt_index * n + k` is the k-th of its prompt."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._model = manager.server_args.model_name

    async def handle(self, request: Request) -> Response:
        body = parse(CompletionRequest, await read_json(request))
        return await respond(request, self._answer(body))

    async def _answer(self, body: CompletionRequest) -> Response:
        check_model(body.model, self._model)
        includes_usage = body.includes_usage()
        if body.best_of is not None and body.best_of != body.n:
            raise invalid("best_of", f"must equal n, which is {body.n}: answers are not ranked")
        if body.echo and body.logprobs is not None:
            raise invalid("logprobs", "not supported together with echo")
        encoder = self._manager.prompts
        num_prompts = len(body.prompt) if _is_batch(body.prompt) else 1
        self._manager.check_room(body.n * num_prompts)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        rids = choice_rids(request_id, num_prompts, body.n)
        prompts = await parse_prompts(encoder, body.prompt, rids)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        requests = choice_requests(self._manager, body, prompts, rids, max_tokens, body.logprobs)
        formatters = [LogprobFormatter(encoder.decoder, one.sampling_params) for one in requests]
        echoes = [encoder.text_of(prompt) if body.echo else "" for prompt in prompts for _ in range(body.n)]
        head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
        }
        group = self._manager.open(requests, choices_per_prompt=body.n)
        if body.stream:
            return EventStream(self._events(group, body, head, formatters, echoes, includes_usage), group.close, rids)
        with group:
            outputs = await group.results()
        usage = UsageCounter(len(outputs), body.n)
        choices = []
        for index, output in enumerate(outputs):
            usage.take(index, output)
            logprobs = None if body.logprobs is None else formatters[index].completion(output)
            choices.append(_choice(index, echoes[index] + output.text, logprobs, finish_name(output)))
        return json_response({**head, "choices": choices, "usage": usage.usage()}, rids=rids)

    async def _events(
        self,
        group: GenerationGroup,
        body: CompletionRequest,
        head: dict[str, Any],
        formatters: list[LogprobFormatter],
        echoes: list[str],
        includes_usage: bool,
    ) -> AsyncIterator[str]:
        if includes_usage:
            head = {**head, "usage": None}
        usage = UsageCounter(len(echoes), body.n)
        for index, echo in enumerate(echoes):
            if echo:
                yield dumps({**head, "choices": [_choice(index, echo, None, None)]})
        async for index, output in group.outputs():
            usage.take(index, output)
            logprobs = None
            if body.logprobs is not None and output.ids:
                logprobs = formatters[index].completion(output)
            if output.text or logprobs:
                yield dumps({**head, "choices": [_choice(index, output.text, logprobs, None)]})
            if output.finish_reason is not None:
                yield dumps({**head, "choices": [_choice(index, "", None, finish_name(output))]})
        if includes_usage:
            yield dumps({**head, "choices": [], "usage": usage.usage()})
        yield "[DONE]"


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
