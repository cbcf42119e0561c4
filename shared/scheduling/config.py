"""What decides how a scheduler behaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.messages import SamplingParams
from shared.scheduling.req import StopFinder

MakeStopFinder = Callable[[SamplingParams], StopFinder]


@dataclass(frozen=True)
class SchedulerConfig:
    """Everything that decides what a scheduler does; the same on every rank of a replica.

    `make_stop_finder` is asked once for each request with stop strings.  `prefill_tokens` is None for whole
    prompts.
    """

    max_total_num_tokens: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    make_stop_finder: MakeStopFinder
    prefill_tokens: int | None = None
    policy: str = "lpm"
    conservativeness: float = 1.0
    use_radix_cache: bool = True
    stream_interval: int = 1
    random_seed: int = 0
    dp_rank: int = 0
    overlap: bool = False

    @property
    def future_cells(self) -> int:
        """Cells of the future-token map, numbered from 1; the batches in flight and the next fit."""
        return self.max_running_requests * 4
