"""One request inside the scheduler."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shared.executor.forward_batch import TokenCounts
from shared.mem_cache.radix_cache import TreeNode
from shared.messages import FinishReason, IntArray, TokenizedGenerateReqInput, TokenLogprob


class StopFinder(Protocol):
    """Watches the text of one request for its stop strings."""

    def push(self, token_id: int, /) -> str | None:
        """Takes the newest token; the stop string that it completed, if any."""
        ...


class Req:
    """A request from arrival to its last token.

    While admitted it owns row `row` of the request table.  Of that row's slots the first `protected_len`
    belong to the radix tree, on the path to `last_node`, which the request has locked; the rest is its own.
    """

    __slots__ = (
        "arrival_round",
        "cached_tokens",
        "counts",
        "fill_ids",
        "finish",
        "last_node",
        "logprobs",
        "max_new_tokens",
        "output_ids",
        "params",
        "prefilled_len",
        "prefix_len",
        "prompt_ids",
        "protected_len",
        "return_logprob",
        "rid",
        "row",
        "sent_len",
        "stop_finder",
        "stop_ids",
        "stream",
        "top_logprobs_num",
    )

    def __init__(
        self,
        recv: TokenizedGenerateReqInput,
        eos_ids: tuple[int, ...],
        max_new_tokens: int,
        stop_finder: StopFinder | None,
    ) -> None:
        params = recv.sampling_params
        self.rid = recv.rid
        self.prompt_ids: IntArray = recv.input_ids
        self.params = params
        self.stream = recv.stream
        self.return_logprob = recv.return_logprob
        self.top_logprobs_num = recv.top_logprobs_num
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self.stop_finder = stop_finder
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.sent_len = 0
        self.finish: FinishReason | None = None
        self.cached_tokens: int | None = None
        self.arrival_round = 0
        self.counts: TokenCounts | None = None
        self.reset_admission()

    def reset_admission(self) -> None:
        """Back to waiting: no row, no slots, nothing prefilled."""
        self.row = -1
        self.prefix_len = 0
        self.protected_len = 0
        self.prefilled_len = 0
        self.last_node: TreeNode | None = None
        self.fill_ids: IntArray = self.prompt_ids
        self.counts = None

    def set_fill_ids(self) -> None:
        """What a prefill has to cover: the prompt and, after a retraction, what was generated."""
        if self.output_ids:
            self.fill_ids = np.concatenate([self.prompt_ids, np.array(self.output_ids, dtype=np.int64)])
        else:
            self.fill_ids = self.prompt_ids

    @property
    def needs_counts(self) -> bool:
        p = self.params
        return p.frequency_penalty != 0 or p.presence_penalty != 0 or p.repetition_penalty != 1

    @property
    def committed_len(self) -> int:
        """Leading tokens whose KV has been computed and may be reused: all but the newest."""
        fill = len(self.fill_ids)
        if self.prefilled_len < fill:
            return self.prefilled_len
        return max(fill, len(self.prompt_ids) + len(self.output_ids) - 1)
