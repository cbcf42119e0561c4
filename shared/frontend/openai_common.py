"""What the chat and the completions route share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.frontend.errors import ApiError
from shared.frontend.generation import Output
from shared.frontend.prompts import Prompt
from shared.frontend.protocol import OpenAIFields
from shared.frontend.sampling import sampling_params
from shared.frontend.tokenizer_manager import TokenizerManager
from shared.messages import TokenizedGenerateReqInput


def check_model(asked: str | None, served: str) -> None:
    """The served model may be named or left out; any other name, "" too, is a 404."""
    if asked is not None and asked != served:
        raise ApiError(
            404,
            f"the model {ascii(asked)[:100]} does not exist; this server has {served}",
            param="model",
            code="model_not_found",
        )


def choice_rids(request_id: str, prompts: int, n: int) -> list[str]:
    """The ids of `n` requests for each of so many prompts, in the order of the choices' indices."""
    count = prompts * n
    return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]


def choice_requests(
    manager: TokenizerManager,
    fields: OpenAIFields,
    prompts: Sequence[Prompt],
    rids: Sequence[str],
    max_new_tokens: int | None,
    top_logprobs: int | None,
) -> list[TokenizedGenerateReqInput]:
    """`n` requests per prompt, in the order of `choice_rids`."""
    return [
        TokenizedGenerateReqInput(
            rid=rids[place * fields.n + choice],
            input_ids=prompt.input_ids,
            sampling_params=sampling_params(
                fields,
                manager.limits,
                prompt_tokens=len(prompt.input_ids),
                max_new_tokens=max_new_tokens,
                min_new_tokens=fields.min_tokens,
                seed=fields.seed,
                choice=choice,
            ),
            stream=fields.stream,
            return_logprob=top_logprobs is not None,
            top_logprobs_num=top_logprobs or 0,
        )
        for place, prompt in enumerate(prompts)
        for choice in range(fields.n)
    ]


class UsageCounter:
    """Prompt tokens once per prompt, completion tokens over all choices."""

    def __init__(self, choices: int, choices_per_prompt: int) -> None:
        self._last = [Output() for _ in range(choices)]
        self._choices_per_prompt = choices_per_prompt

    def take(self, index: int, output: Output) -> None:
        self._last[index] = output

    def usage(self) -> dict[str, Any]:
        firsts = self._last[:: self._choices_per_prompt]
        prompt_tokens = sum(output.prompt_tokens for output in firsts)
        completion_tokens = sum(output.completion_tokens for output in self._last)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)},
        }


def finish_name(output: Output) -> str | None:
    return None if output.finish_reason is None else output.finish_reason.type
