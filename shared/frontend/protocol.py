"""Request bodies.  Types are strict: no number in a string, no bool for a number, no NaN.

`parse` refuses a field that would change the answer and is not supported; fields that cannot change it are
ignored, and null is the same as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.frontend.errors import from_validation, invalid

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_ids(value: Any) -> Any:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    BeforeValidator(_as_list),
    Field(max_length=MAX_STOPS),
]
StopTokenIds = Annotated[list[int], BeforeValidator(_as_ids), Field(max_length=MAX_LOGIT_BIASES)]
LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)]


class Body(BaseModel):
    """`ignored` fields may hold anything; a field of `neutral` only a value that asks for nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}


class SamplingFields(Body):
    """What OpenAI's routes and `/generate` have in common, with SGLang's names where OpenAI has none."""

    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop = []
    stop_token_ids: StopTokenIds = []
    logit_bias: LogitBias = {}
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False


class StreamOptions(Body):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class OpenAIFields(SamplingFields):
    ignored = frozenset(
        {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)

    def includes_usage(self) -> bool:
        if self.stream_options is None:
            return False
        if not self.stream:
            raise invalid("stream_options", "only allowed with stream: true")
        return parse(StreamOptions, self.stream_options, at="stream_options.").include_usage


class CompletionRequest(OpenAIFields):
    neutral = {"suffix": ("",), "service_tier": ("auto", "default")}

    prompt: Any
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class ChatCompletionRequest(OpenAIFields):
    neutral = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
    }

    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)


class NativeSamplingParams(SamplingFields):
    neutral = {
        "n": (1,),
        "spaces_between_special_tokens": (True,),
    }

    max_new_tokens: int = Field(128, ge=1)
    min_new_tokens: int = Field(0, ge=0)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63)


class GenerateRequest(Body):
    neutral = {
        "logprob_start_len": (-1,),
        "return_text_in_logprobs": (False,),
        "return_hidden_states": (False,),
        "log_metrics": (True, False),
    }

    text: Any = None
    input_ids: list[Any] | None = None
    image_data: Any = None
    sampling_params: Any = {}
    rid: Any = None
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)


class AbortRequest(Body):
    rid: str | None = None
    abort_all: bool = False


B = TypeVar("B", bound=Body)


def parse(model: type[B], body: Mapping[str, Any], at: str = "") -> B:
    """`body` as a `model`; ApiError 400 with the field's name, after the prefix `at`, for anything else."""
    known: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in model.ignored:
            continue
        if name in model.model_fields:
            known[name] = value
        elif value not in model.neutral.get(name, ()):
            raise invalid(at + ascii(name)[1:-1][:100], "not supported by this server")
    try:
        return model.model_validate(known)
    except ValidationError as error:
        found = from_validation(error)
        raise invalid(f"{at}{found.param}", found.message.removeprefix(f"{found.param}: ")) from None
