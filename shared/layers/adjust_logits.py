"""Logits of the rows whose requests bend them: bias, penalties, tokens that may not come yet."""

from __future__ import annotations

import numpy as np
import torch

from shared.executor.forward_batch import FloatArray, ForwardBatch, SamplingBatch
from shared.executor.to_device import to_device
from shared.messages import IntArray


def adjust_logits(logits: torch.Tensor, batch: ForwardBatch) -> tuple[IntArray, torch.Tensor]:
    """The batch's rows that need it, and their adjusted logits as a float32 copy `[rows, vocab]`.

    In this order: logit bias is added; a repetition penalty divides positive and multiplies negative logits
    of tokens in prompt or output; frequency penalty (times its count) and presence penalty are taken off
    tokens of the output; blocked ids go to minus infinity while fewer than `min_new_tokens` tokens are out.
    """
    sampling = batch.sampling
    blocked = [
        limit[1] if limit is not None and batch.output_lens[row] < limit[0] else None
        for row, limit in enumerate(sampling.blocked_until)
    ]
    rows = np.array(
        [
            row
            for row, needs in enumerate(zip(sampling.counts, sampling.logit_bias, blocked, strict=True))
            if any(need is not None for need in needs)
        ],
        dtype=np.int64,
    )
    adjusted = logits[to_device(rows, logits.device)].float()
    _add_bias(adjusted, rows, sampling)
    _penalise(adjusted, rows, sampling)
    _block(adjusted, rows, blocked)
    return rows, adjusted


def _add_bias(adjusted: torch.Tensor, rows: IntArray, sampling: SamplingBatch) -> None:
    entries = [(at, *bias) for at, row in enumerate(rows) if (bias := sampling.logit_bias[row]) is not None]
    if not entries:
        return
    cells = _cells([(at, ids) for at, ids, _ in entries], adjusted)
    values = to_device(np.concatenate([values for _, _, values in entries]), adjusted.device)
    adjusted.view(-1).index_add_(0, cells, values)


def _penalise(adjusted: torch.Tensor, rows: IntArray, sampling: SamplingBatch) -> None:
    entries = [
        (at, row, np.flatnonzero(counts.seen), counts.output)
        for at, row in enumerate(rows)
        if (counts := sampling.counts[row]) is not None
    ]
    if not entries:
        return
    cells = _cells([(at, seen) for at, _, seen, _ in entries], adjusted)
    repetition = np.concatenate(
        [np.full(seen.size, sampling.repetition_penalty[row], np.float32) for _, row, seen, _ in entries]
    )
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    subtracted: FloatArray = np.concatenate(
        [output[seen] * frequency[row] + (output[seen] > 0) * presence[row] for _, row, seen, output in entries]
    ).astype(np.float32)
    factor = to_device(repetition, adjusted.device)
    flat = adjusted.view(-1)
    values = flat[cells]
    values = torch.where(values > 0, values / factor, values * factor)
    flat[cells] = values.sub_(to_device(subtracted, adjusted.device))


def _block(adjusted: torch.Tensor, rows: IntArray, blocked: list[IntArray | None]) -> None:
    entries = [(at, ids) for at, row in enumerate(rows) if (ids := blocked[row]) is not None]
    if entries:
        adjusted.view(-1)[_cells(entries, adjusted)] = -torch.inf


def _cells(entries: list[tuple[int, IntArray]], matrix: torch.Tensor) -> torch.Tensor:
    """Flat indices into `matrix` of (row, column ids) pairs, int64."""
    return to_device(np.concatenate([at * matrix.shape[1] + ids for at, ids in entries]), matrix.device)
