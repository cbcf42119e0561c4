"""What the served model and its engine can take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Known once the middle corner is ready.  The counts are of one replica, `dp_size` of which exist."""

    context_length: int
    max_total_num_tokens: int
    max_running_requests: int
    vocab_size: int
    dp_size: int = 1

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output together may have this many tokens."""
        return min(self.context_length, self.max_total_num_tokens)
