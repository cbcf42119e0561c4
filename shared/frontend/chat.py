"""`POST /v1/chat/completions`."""

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
from shared.frontend.prompts import check_text
from shared.frontend.protocol import ChatCompletionRequest, parse
from shared.frontend.tokenizer_manager import TokenizerManager

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI's role, and its name in the chat templates of models."""


def parse_messages(messages: Sequence[Any]) -> list[dict[str, str]]:
    """Messages with plain text.  ApiError 400 for anything that is not text: images, tools, unknown roles."""
    checked = []
    for place, message in enumerate(messages):
        at = f"messages[{place}]"
        if not isinstance(message, dict):
            raise invalid(at, "must be an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"{at}.role", f"must be one of {', '.join(_ROLES)} (got {shown(role)})")
        for name, value in message.items():
            if name not in ("role", "content", "name") and value not in (None, []):
                raise invalid(f"{at}.{ascii(name)[1:-1][:60]}", "not supported by this server")
        one = {"role": _ROLES[role], "content": _text(message.get("content"), f"{at}.content")}
        name = message.get("name")
        if name is not None:
            one["name"] = check_text(name, f"{at}.name")
        checked.append(one)
    return checked


def _text(content: Any, at: str) -> str:
    """A string, or the text parts of a list joined without anything between them."""
    if isinstance(content, str):
        return check_text(content, at)
    if not isinstance(content, list) or not content:
        raise invalid(at, "must be a string or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        where = f"{at}[{place}]"
        if not isinstance(part, dict):
            raise invalid(where, 'must be an object such as {"type": "text", "text": "..."}')
        if part.get("type") != "text":
            raise invalid(f"{where}.type", f'only "text" is supported (got {shown(part.get("type"))})')
        texts.append(check_text(part.get("text"), f"{where}.text"))
    return "".join(texts)


class ChatCompletions:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._model = manager.server_args.model_name

    async def handle(self, request: Request) -> Response:
        body = parse(ChatCompletionRequest, await read_json(request))
        return await respond(request, self._answer(body))

    async def _answer(self, body: ChatCompletionRequest) -> Response:
        check_model(body.model, self._model)
        includes_usage = body.includes_usage()
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        elif body.max_tokens not in (None, max_tokens):
            raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
        self._manager.check_room(body.n)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        rids = choice_rids(request_id, 1, body.n)
        prompt = await self._manager.prompts.from_messages(parse_messages(body.messages), rids)
        top_logprobs = body.top_logprobs if body.logprobs else None
        requests = choice_requests(self._manager, body, [prompt], rids, max_tokens, top_logprobs)
        decoder = self._manager.prompts.decoder
        formatters = [LogprobFormatter(decoder, one.sampling_params) for one in requests]
        head = {"id": request_id, "created": int(time.time()), "model": self._model}
        group = self._manager.open(requests, choices_per_prompt=body.n)
        if body.stream:
            return EventStream(self._events(group, body, head, formatters, includes_usage), group.close, rids)
        with group:
            outputs = await group.results()
        usage = UsageCounter(body.n, body.n)
        choices = []
        for index, output in enumerate(outputs):
            usage.take(index, output)
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": output.text, "refusal": None},
                    "logprobs": formatters[index].chat(output) if body.logprobs else None,
                    "finish_reason": finish_name(output),
                }
            )
        answer = {**head, "object": "chat.completion", "choices": choices, "usage": usage.usage()}
        return json_response(answer, rids=rids)

    async def _events(
        self,
        group: GenerationGroup,
        body: ChatCompletionRequest,
        head: dict[str, Any],
        formatters: list[LogprobFormatter],
        includes_usage: bool,
    ) -> AsyncIterator[str]:
        head = {**head, "object": "chat.completion.chunk"}
        if includes_usage:
            head["usage"] = None
        usage = UsageCounter(body.n, body.n)
        for index in range(body.n):
            yield dumps({**head, "choices": [_choice(index, {"role": "assistant", "content": ""})]})
        async for index, output in group.outputs():
            usage.take(index, output)
            logprobs = formatters[index].chat(output) if body.logprobs and output.ids else None
            if output.text or logprobs:
                yield dumps({**head, "choices": [_choice(index, {"content": output.text}, logprobs)]})
            if output.finish_reason is not None:
                yield dumps({**head, "choices": [_choice(index, {}, None, finish_name(output))]})
        if includes_usage:
            yield dumps({**head, "choices": [], "usage": usage.usage()})
        yield "[DONE]"


def _choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
