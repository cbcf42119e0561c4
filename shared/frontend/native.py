"""`POST /generate`: SGLang's native route.

A chunk of a stream holds everything so far (`text`, `output_ids`, log-probabilities), not what is new.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shared.frontend.errors import invalid
from shared.frontend.generation import GenerationGroup, Output
from shared.frontend.http import EventStream, dumps, json_response, read_json, respond
from shared.frontend.logprobs import finite
from shared.frontend.pictures import decode_pictures
from shared.frontend.prompts import Prompt, check_text
from shared.frontend.protocol import GenerateRequest, NativeSamplingParams, parse
from shared.frontend.sampling import sampling_params
from shared.frontend.tokenizer_manager import TokenizerManager
from shared.messages import FinishReason, SamplingParams, TokenizedGenerateReqInput, TokenLogprob
from shared.scheduling.picture import PICTURE_TOKENS

MAX_RID_CHARS = 256

Answer = dict[str, Any]
"""`text`, `output_ids`, `meta_info`; in a stream of a batch also `index`."""


class Generate:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def handle(self, request: Request) -> Response:
        body = parse(GenerateRequest, await read_json(request))
        return await respond(request, self._respond(body))

    async def _respond(self, body: GenerateRequest) -> Response:
        requests, is_batch = await self._requests(body)
        rids = [one.rid for one in requests]
        if body.stream:
            answers, close = self._open_stream(body, requests, is_batch)
            return EventStream(_events(answers), close, rids)
        return json_response(await self._whole_answer(body, requests, is_batch), rids=rids)

    async def answer(self, body: GenerateRequest) -> Answer | list[Answer]:
        """The answer to one prompt, or to each of a batch.  Raises ApiError."""
        return await self._whole_answer(body, *await self._requests(body))

    async def open_stream(self, body: GenerateRequest) -> tuple[AsyncIterator[Answer], Callable[[], None]]:
        """What has come so far, each time more has; and what must be called at the end.  Raises ApiError."""
        return self._open_stream(body, *await self._requests(body))

    async def _whole_answer(
        self, body: GenerateRequest, requests: list[TokenizedGenerateReqInput], is_batch: bool
    ) -> Answer | list[Answer]:
        with self._manager.open(requests) as group:
            outputs = await group.results()
        answers = [self._answer_of(one, output, body) for one, output in zip(requests, outputs, strict=True)]
        return answers if is_batch else answers[0]

    def _open_stream(
        self, body: GenerateRequest, requests: list[TokenizedGenerateReqInput], is_batch: bool
    ) -> tuple[AsyncIterator[Answer], Callable[[], None]]:
        group = self._manager.open(requests)
        return self._answers(group, body, requests, is_batch), group.close

    async def _answers(
        self,
        group: GenerationGroup,
        body: GenerateRequest,
        requests: list[TokenizedGenerateReqInput],
        is_batch: bool,
    ) -> AsyncIterator[Answer]:
        totals = [Output() for _ in requests]
        async for index, output in group.outputs():
            totals[index].add(output)
            answer = self._answer_of(requests[index], totals[index], body)
            yield {**answer, "index": index} if is_batch else answer

    async def _requests(self, body: GenerateRequest) -> tuple[list[TokenizedGenerateReqInput], bool]:
        """The requests, and whether they came as a batch."""
        if body.top_logprobs_num and not body.return_logprob:
            raise invalid("top_logprobs_num", "needs return_logprob: true")
        prompts, rids, is_batch = await self._prompts(body)
        pictures = await self._pictures(body.image_data, prompts, is_batch)
        settings = self._settings(body.sampling_params, prompts, pictures)
        requests = [
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=prompt.input_ids,
                sampling_params=params,
                stream=body.stream,
                return_logprob=body.return_logprob,
                top_logprobs_num=body.top_logprobs_num,
                image_data=picture,
            )
            for rid, prompt, params, picture in zip(rids, prompts, settings, pictures, strict=True)
        ]
        return requests, is_batch

    async def _prompts(self, body: GenerateRequest) -> tuple[list[Prompt], list[str], bool]:
        """The prompts, their requests' ids, and whether they came as a batch."""
        encoder = self._manager.prompts
        if (body.text is None) == (body.input_ids is None):
            raise invalid("text", "give either text or input_ids")
        if body.text is not None:
            texts, params, is_batch = _list_of(body.text, "text")
            self._manager.check_room(len(texts))
            rids = _rids(body.rid, len(texts), is_batch)
            return await encoder.from_texts(texts, params, rids), rids, is_batch
        ids = body.input_ids or []
        if ids and all(isinstance(part, list) for part in ids):
            self._manager.check_room(len(ids))
            rids = _rids(body.rid, len(ids), True)
            return await encoder.from_ids(ids, [f"input_ids[{place}]" for place in range(len(ids))]), rids, True
        rids = _rids(body.rid, 1, False)
        return await encoder.from_ids([ids], ["input_ids"]), rids, False

    async def _pictures(self, given: Any, prompts: list[Prompt], is_batch: bool) -> list[bytes | None]:
        """The picture of each prompt.  Raises ApiError 400."""
        if given is None:
            return [None] * len(prompts)
        if self._manager.server_args.device != "sim":
            raise invalid("image_data", "the model takes only text (--device sim takes pictures)")
        texts, params, is_list = _list_of(given, "image_data")
        if is_list != is_batch or len(texts) != len(prompts):
            raise invalid("image_data", "give a string for one prompt, and for a list of prompts a list as long")
        limits = self._manager.limits
        for text, param, prompt in zip(texts, params, prompts, strict=True):
            length = len(prompt.input_ids) + PICTURE_TOKENS
            if text is not None and length > limits.max_request_tokens - 1:
                raise invalid(
                    param,
                    f"{length} tokens, {PICTURE_TOKENS} of them for the picture, do not fit: a request can have "
                    f"{limits.max_request_tokens}, and one must be left for the answer",
                )
        return await asyncio.to_thread(decode_pictures, texts, params)

    def _settings(self, given: Any, prompts: list[Prompt], pictures: list[bytes | None]) -> list[SamplingParams]:
        if isinstance(given, list):
            if len(given) != len(prompts):
                raise invalid("sampling_params", f"{len(given)} entries for {len(prompts)} prompts")
            ats = [f"sampling_params[{place}]." for place in range(len(given))]
        else:
            given = [given] * len(prompts)
            ats = ["sampling_params."] * len(prompts)
        lengths = [
            len(prompt.input_ids) + (PICTURE_TOKENS if picture is not None else 0)
            for prompt, picture in zip(prompts, pictures, strict=True)
        ]
        return [self._one_setting(*one) for one in zip(given, lengths, ats, strict=True)]

    def _one_setting(self, given: Any, prompt_tokens: int, at: str) -> SamplingParams:
        if not isinstance(given, dict):
            raise invalid(at[:-1], "must be an object")
        fields = parse(NativeSamplingParams, given, at)
        return sampling_params(
            fields,
            self._manager.limits,
            prompt_tokens=prompt_tokens,
            max_new_tokens=fields.max_new_tokens,
            min_new_tokens=fields.min_new_tokens,
            seed=fields.seed if fields.sampling_seed is None else fields.sampling_seed,
            at=at,
        )

    def _answer_of(self, request: TokenizedGenerateReqInput, output: Output, body: GenerateRequest) -> Answer:
        meta: dict[str, Any] = {
            "id": request.rid,
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            "finish_reason": _finish(output.finish_reason, request.sampling_params),
        }
        if body.return_logprob:
            meta |= self._logprobs(output.ids, output.logprobs)
        return {"text": output.text, "output_ids": list(output.ids), "meta_info": meta}

    def _logprobs(self, ids: list[int], logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """`[logprob, token id, None]` of each token and alternative, as SGLang without token texts."""
        return {
            "output_token_logprobs": [
                [finite(entry.logprob), token_id, None] for token_id, entry in zip(ids, logprobs, strict=True)
            ],
            "output_top_logprobs": [[[finite(value), other, None] for other, value in entry.top] for entry in logprobs],
        }


async def _events(answers: AsyncIterator[Answer]) -> AsyncIterator[str]:
    async for answer in answers:
        yield dumps(answer)
    yield "[DONE]"


def _finish(reason: FinishReason | None, params: SamplingParams) -> dict[str, Any] | None:
    if reason is None:
        return None
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.type == "length":
        return {"type": "length", "length": params.max_new_tokens}
    return {"type": "abort", "message": reason.message or "aborted"}


def _list_of(given: Any, param: str) -> tuple[list[Any], list[str], bool]:
    """`given` as a list, the name of each part, and whether it was one."""
    if not isinstance(given, list):
        return [given], [param], False
    if not given:
        raise invalid(param, "is an empty list")
    return given, [f"{param}[{place}]" for place in range(len(given))], True


def _rids(given: Any, count: int, is_batch: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    rids, params, is_list = _list_of(given, "rid")
    if is_list != is_batch or len(rids) != count:
        raise invalid("rid", "give a string for one prompt, and for a list of prompts a list as long")
    for rid, param in zip(rids, params, strict=True):
        if not 0 < len(check_text(rid, param)) <= MAX_RID_CHARS:
            raise invalid(param, f"must have from 1 to {MAX_RID_CHARS} characters")
    return rids
