"""How a model's rows are shared among tensor-parallel ranks.  Imports no torch.

Sizes need not divide: the first ranks take one unit more.  A query head always sits on the rank of the KV
head it reads, so attention needs no communication (SmolLM2 has 9 query and 3 KV heads: two ranks hold 2 and 1
KV heads with 6 and 3 query heads).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shared.weights.model_config import ModelConfig


@dataclass(frozen=True)
class Partition:
    """What one rank holds, as half-open ranges into the whole model."""

    query_heads: range
    kv_heads: range
    intermediate: range
    vocab: range

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Partition:
        """The share of `rank` of `size`.  Raises ValueError where `size` is not one of `allowed_tp_sizes`."""
        if size not in allowed_tp_sizes(config, size):
            raise ValueError(
                f"{config.num_key_value_heads} KV heads cannot be split over {size} ranks; "
                f"up to {allowed_tp_sizes(config, size)[-1]} can share them"
            )
        kv_heads = split_evenly(config.num_key_value_heads, size)[rank]
        group = config.num_attention_heads // config.num_key_value_heads
        return cls(
            query_heads=range(kv_heads.start * group, kv_heads.stop * group),
            kv_heads=kv_heads,
            intermediate=split_evenly(config.intermediate_size, size)[rank],
            vocab=split_evenly(config.vocab_size, size)[rank],
        )


def split_evenly(total: int, parts: int) -> list[range]:
    """`parts` consecutive ranges that cover `range(total)`; the first `total % parts` are one longer."""
    size, longer = divmod(total, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def allowed_tp_sizes(config: ModelConfig, up_to: int) -> list[int]:
    """The tensor-parallel sizes from 1 to `up_to` that leave no rank without a KV head."""
    largest = min(config.num_key_value_heads, config.intermediate_size, config.vocab_size)
    return list(range(1, min(largest, up_to) + 1))
