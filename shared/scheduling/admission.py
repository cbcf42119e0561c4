"""How much of the pool the running requests may still want: the estimate that admission rests on."""

from __future__ import annotations

from collections.abc import Iterable

from shared.scheduling.req import Req

NEW_TOKENS_CLIP = 4096
"""A request is never assumed to generate more than this."""
RETRACT_DECODE_STEPS = 20
"""A retraction makes room for this many further steps of those that stay."""


class NewTokenEstimate:
    """The share of its remaining `max_new_tokens` that a running request is assumed to use.

    Starts high, sinks a little with every decode step that fits, and jumps up when a retraction shows that it
    was too low: below one it overcommits the pool, which retraction makes safe.
    """

    INITIAL = 0.7
    FLOOR = 0.14
    DECAY = 0.001

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(self.INITIAL * conservativeness, 1.0)
        self._floor = min(self.FLOOR * conservativeness, 1.0)
        self.ratio = self._initial

    def reserve(self, reqs: Iterable[Req]) -> int:
        """Slots to keep for what `reqs`, all running, will still generate."""
        return int(self.ratio * sum(remaining_new_tokens(req) for req in reqs))

    def decoded(self) -> None:
        self.ratio = max(self.ratio - self.DECAY, self._floor)

    def retracted(self, survivors: list[Req]) -> None:
        done = sum(len(req.output_ids) + RETRACT_DECODE_STEPS for req in survivors)
        total = sum(req.max_new_tokens for req in survivors)
        self.ratio = min(1.0, done / total) if total else self._initial

    def idle(self) -> None:
        self.ratio = self._initial


def remaining_new_tokens(req: Req) -> int:
    """Tokens that `req` may still generate, clipped."""
    return min(req.max_new_tokens - len(req.output_ids), NEW_TOKENS_CLIP)
