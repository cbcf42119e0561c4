"""Embedding and head, each rank holding a range of the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shared.kernels.base import Kernels
from shared.parallel.tp_group import TpGroup


class VocabParallelEmbedding:
    def __init__(self, weight: Tensor, vocab: range, tp_group: TpGroup) -> None:
        """`weight` is `[len(vocab), hidden]`, the rows of this rank's tokens."""
        self._weight = weight
        self._vocab = vocab
        self._tp_group = tp_group

    def __call__(self, input_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`; a rank adds zeros for the tokens of the others."""
        if self._tp_group.size == 1:
            return F.embedding(input_ids, self._weight)
        local = input_ids - self._vocab.start
        is_elsewhere = (local < 0) | (local >= len(self._vocab))
        embedded = F.embedding(local.masked_fill(is_elsewhere, 0), self._weight)
        return self._tp_group.all_reduce(embedded.masked_fill_(is_elsewhere[:, None], 0.0))


class ParallelHead:
    def __init__(self, weight: Tensor, widths: list[int], tp_group: TpGroup, kernels: Kernels) -> None:
        """`weight` is `[widths[rank], hidden]`; `widths` says how many tokens each rank scores."""
        self._packed = kernels.pack_linear(weight)
        self._widths = widths
        self._tp_group = tp_group
        self._kernels = kernels

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocab]` of `[rows, hidden]`, the same bits on every rank."""
        return self._tp_group.all_gather(self._kernels.linear(hidden, self._packed, None), self._widths)
