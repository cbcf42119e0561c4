"""What crosses a process boundary: frozen dataclasses, and named tuples where one is made every step.

Names follow the history (`TokenizedGenerateReqInput`, `BatchTokenIDOut`, `BatchStrOut`).  The way of a request:

    TokenizerManager --TokenizedGenerateReqInput--> the stage's middle corner
    middle corner    --BatchTokenIDOut-->           DetokenizerManager
    DetokenizerManager --BatchStrOut-->             TokenizerManager

Everything that is not a `BatchTokenIDOut` passes through the detokenizer untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

FinishType = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.  Already validated by the frontend; every rank trusts it.

    `seed` is always set: a request that names none is given one by the TokenizerManager, so that every rank
    draws the same token.  `top_k` is -1 for "the whole vocabulary".  A `temperature` at or below
    `GREEDY_TEMPERATURE` is greedy.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False


GREEDY_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class FinishReason:
    """Why a request ended.

    `matched` is the token id or the stop string of a "stop".  `message` and `status` (an HTTP status) belong
    to an "abort".
    """

    type: FinishType
    matched: int | str | None = None
    message: str | None = None
    status: int | None = None


class TokenLogprob(NamedTuple):
    """Natural-log probability of one generated token, from the raw logits, with its best alternatives.

    `top` holds `(token id, logprob)`, best first; empty where none were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class TokenizedGenerateReqInput:
    """One request, tokenized.  `input_ids` is CPU 1D int64, at least one token, all inside the vocabulary.

    `image_data` is a picture that comes before the prompt, as the client sent it.
    """

    rid: str
    input_ids: IntArray
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    image_data: bytes | None = None


@dataclass(frozen=True)
class AbortReq:
    """Ends the request `rid`, wherever it is; with `rid` None, all of them.  Unknown ids are ignored."""

    rid: str | None


@dataclass(frozen=True)
class FlushCacheReq:
    """Empties the prefix cache.  Answered by one `FlushCacheOut` per replica."""

    id: str


@dataclass(frozen=True)
class FlushCacheOut:
    id: str
    dp_rank: int
    success: bool
    message: str


@dataclass(frozen=True)
class GetInternalStateReq:
    """Asks every replica for its `SchedulerStats`; answered by one `GetInternalStateOut` per replica."""

    id: str


@dataclass(frozen=True)
class GetInternalStateOut:
    id: str
    stats: SchedulerStats


@dataclass(frozen=True)
class SchedulerStats:
    """Where one replica stands.  Sent on its own whenever `running` or `waiting` has changed.

    All counts are of requests, except the four that end in `_tokens` (token slots of the KV pool):
    `free + evictable + protected = capacity` when nothing is running and no slot has leaked.
    `protected_tokens` are cached tokens that a live request has locked.
    """

    dp_rank: int
    running: int
    waiting: int
    free_tokens: int
    evictable_tokens: int
    protected_tokens: int
    capacity_tokens: int
    free_request_slots: int
    max_running_requests: int
    forwards: int
    retractions: int
    leaks: int


class BatchTokenIDOut(NamedTuple):
    """New tokens of several requests, scheduler to detokenizer.  All lists are parallel.

    `new_ids` holds each request's tokens since its previous message; the id that ended the request (an EOS or
    a stop token) is among them and counts in `completion_tokens`.  A request appears at most once per message
    and never again after the message that carries its finish reason.  `cached_tokens` is how many prompt
    tokens came from the prefix cache at first admission.
    """

    rids: list[str]
    new_ids: list[list[int]]
    finish_reasons: list[FinishReason | None]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    sampling_params: list[SamplingParams]
    logprobs: list[list[TokenLogprob] | None]


class BatchStrOut(NamedTuple):
    """The same requests with `texts`: what each gained since its previous message, whole characters only.

    Text that may still turn out to be the beginning of a stop string is held back until it is known not to be.
    """

    rids: list[str]
    texts: list[str]
    new_ids: list[list[int]]
    finish_reasons: list[FinishReason | None]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    logprobs: list[list[TokenLogprob] | None]


SchedulerInput = TokenizedGenerateReqInput | AbortReq | FlushCacheReq | GetInternalStateReq
SchedulerOutput = BatchTokenIDOut | SchedulerStats | FlushCacheOut | GetInternalStateOut
FrontendInput = BatchStrOut | SchedulerStats | FlushCacheOut | GetInternalStateOut


@dataclass(frozen=True)
class PortArgs:
    """The private addresses of one launch.  Every `ipc://` path lies in `run_dir`, which has mode 0700.

    `secret` authenticates rpyc connections.
    """

    run_dir: str
    tokenizer_ipc_name: str
    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    secret: bytes = field(repr=False)
