"""What a forward takes and gives: plain numpy on the CPU, whatever the device.

A `ForwardBatch` is made by `shared.scheduling` and read by a model runner, which copies it to its device.
Scheduling never touches a tensor, and a runner never touches a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shared.messages import IntArray, TokenLogprob

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class ForwardMode(IntEnum):
    EXTEND = 1
    DECODE = 2


class TokenCounts:
    """How often each token stands in a request: the state of the penalties of one request.

    Owned by the request, changed only by the runner, which adds every token it samples: so under overlap the
    newest token counts before the scheduler has seen it (case C46).

    `output` is int32 `[vocab]`, counts among generated tokens; `seen` is bool `[vocab]`, prompt or output.
    """

    __slots__ = ("output", "seen")

    def __init__(self, vocab_size: int, prompt_ids: IntArray, output_ids: list[int]) -> None:
        self.output = np.zeros(vocab_size, dtype=np.int32)
        self.seen = np.zeros(vocab_size, dtype=np.bool_)
        self.seen[prompt_ids] = True
        for token in output_ids:
            self.add(token)

    def add(self, token: int) -> None:
        self.output[token] += 1
        self.seen[token] = True


@dataclass(slots=True)
class SamplingBatch:
    """Sampling settings of a batch, one row per request (`[bs]` each); rebuilt only when the batch changes.

    `greedy` rows ignore temperature, top_k, top_p and min_p.  `top_k` is the vocabulary size where unlimited.
    The three lists hold None for rows that do not need them:
    `counts` (frequency, presence or repetition penalty set), `logit_bias` (ids, values),
    `blocked_until` (`(min_new_tokens, ids)`: those ids may not be chosen while fewer tokens are out).
    """

    greedy: BoolArray
    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    frequency_penalty: FloatArray
    presence_penalty: FloatArray
    repetition_penalty: FloatArray
    seed: npt.NDArray[np.uint64]
    counts: list[TokenCounts | None]
    logit_bias: list[tuple[IntArray, FloatArray] | None]
    blocked_until: list[tuple[int, IntArray] | None]
    all_greedy: bool
    any_adjustment: bool
    """Whether any row has counts, a bias or blocked ids."""


@dataclass(slots=True)
class ForwardBatch:
    """One forward.  `T` tokens of `bs` requests, the tokens of a request next to each other, in batch order.

    The new tokens of request i stand at positions `seq_lens[i] - extend_lens[i] … seq_lens[i] - 1`; their KV
    goes to `out_cache_loc`, and the whole context's slots are
    `req_to_token[req_pool_indices[i], :seq_lens[i]]` (the new ones included).  Prefix slots of one request may
    be written by another request of the same batch, so a layer must store all KV before it attends.

    A negative input id `-k` stands for the token in cell `k` of the future-token map (stage 4's overlap); it is
    replaced before `ForwardRunner.launch`, on the runner's device, and `input_ids` may then be a tensor there.
    """

    step: int
    mode: ForwardMode
    rids: list[str]
    input_ids: IntArray
    """[T]"""
    positions: IntArray
    """[T]"""
    req_pool_indices: IntArray
    """[bs]"""
    seq_lens: IntArray
    """[bs]"""
    extend_lens: IntArray
    """[bs]; all ones in DECODE"""
    out_cache_loc: IntArray
    """[T]"""
    req_to_token: npt.NDArray[np.int32]
    """[request slots, context length]; the scheduler's own table, read only here"""
    emits: BoolArray
    """[bs]; False for a chunk that is not a prompt's last: its sampled token is thrown away"""
    output_lens: IntArray
    """[bs]; tokens generated before this forward"""
    sampling: SamplingBatch
    top_logprobs_nums: list[int | None] | None
    """[bs]; None for rows without logprobs, and None as a whole when no row wants any"""


@dataclass(slots=True)
class ForwardResult:
    """What came out of a forward.

    `failed` marks rows whose largest logit is NaN or infinite (None: no row); their token is meaningless.
    `logprobs` has one entry per row, None for rows that did not ask.
    """

    next_token_ids: IntArray
    """[bs]"""
    logprobs: list[TokenLogprob | None] | None = None
    failed: BoolArray | None = None


class PendingForward(Protocol):
    """A launched forward.

    `device_token_ids` is what will be in `ForwardResult.next_token_ids`, as the device has it (an array or a
    tensor of `[bs]`): a later launch on the same device may take its input from there before `wait` returns.
    """

    @property
    def device_token_ids(self) -> Any: ...

    def wait(self) -> ForwardResult:
        """Blocks until the result is there."""
        ...


class ForwardRunner(Protocol):
    """One rank's device: `shared.executor.model_runner` (torch) or `shared.executor.sim_runner`."""

    max_total_num_tokens: int
    """Token slots this rank has room for; the scheduler uses the minimum over ranks."""

    def to_device(self, array: IntArray) -> Any:
        """`array` as `PendingForward.device_token_ids` is: an array or a tensor, which index and add alike.

        As `launch`, to be called by one thread only.
        """
        ...

    def launch(self, batch: ForwardBatch) -> PendingForward:
        """Starts one forward and one sample.  Forwards run in launch order."""
        ...
