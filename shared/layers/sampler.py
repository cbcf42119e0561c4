"""Logits in, one token per row out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shared.executor.forward_batch import BoolArray, ForwardBatch, ForwardResult
from shared.executor.to_device import to_device
from shared.kernels.base import Limits, SamplingKernels
from shared.kernels.torch_sampling import best_first, race
from shared.layers.adjust_logits import adjust_logits
from shared.layers.noise import exponential_noise, row_keys
from shared.messages import IntArray, TokenLogprob

ROWS_AT_ONCE = 16
"""Random rows worked on together on a CPU: their temporaries stay in its cache, and small beside the logits."""


@dataclass(frozen=True)
class Sampled:
    """What was sampled, still on the device."""

    token_ids: torch.Tensor
    """int64 [bs]"""
    failed: torch.Tensor
    """bool [bs]"""
    logprobs: DeviceLogprobs | None

    def to_host(self) -> Sampled:
        """The same on the CPU.  From a GPU the copies are only queued: they are there after what was queued."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return Sampled(_to_host(self.token_ids), _to_host(self.failed), logprobs)

    def result(self, batch: ForwardBatch) -> ForwardResult:
        """Of values on the CPU, to be asked for once: adds each token to its row's `TokenCounts`, unless the row
        emits none."""
        token_ids, failed = self.token_ids.numpy(), self.failed.numpy()
        if batch.sampling.any_adjustment:
            for row, counts in enumerate(batch.sampling.counts):
                if counts is not None and batch.emits[row]:
                    counts.add(int(token_ids[row]))
        logprobs: list[TokenLogprob | None] | None = None
        if batch.top_logprobs_nums is not None:
            logprobs = [None] * len(token_ids)
            if self.logprobs is not None:
                self.logprobs.list_into(logprobs, batch.top_logprobs_nums, failed)
        return ForwardResult(token_ids, logprobs, failed if failed.any() else None)


class Sampler:
    """Chooses the next token of every row of a batch; a row's choice never depends on its neighbours.

    A greedy row takes the lowest id among its largest logits.  A random row holds a race: token t arrives at
    `E_t / p_t`, with Exp(1) noise `E_t` keyed by the row's seed, the position to be filled and t; the first
    to arrive is distributed as p.  Unlike an inverse CDF this does not turn the last bits of a sum over the
    vocabulary, which move with the batch size, into another token.
    """

    def __init__(self, kernels: SamplingKernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: torch.Tensor, batch: ForwardBatch) -> ForwardResult:
        """Samples from `logits` on the CPU; see `sample`."""
        return self.sample(logits, batch).result(batch)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: ForwardBatch) -> Sampled:
        """Samples from `logits`, `[bs, vocab]` in any float type, which are left as they are.

        Does not wait for the device, but reads the rows' `TokenCounts` as they are now.  A row is marked
        `failed` if its largest logit is NaN or infinite, before or after adjustment: it has no distribution
        to choose from.  Log-probabilities are those of the logits as given; failed rows and rows that emit
        nothing have none.
        """
        sampling, device = batch.sampling, logits.device
        largest, token_ids = logits.max(dim=-1)
        failed = ~largest.isfinite()

        rows, adjusted = np.empty(0, np.int64), logits[:0]
        if sampling.any_adjustment:
            rows, adjusted = adjust_logits(logits, batch)
        if rows.size:
            at = to_device(rows, device)
            largest, token_ids[at] = adjusted.max(dim=-1)
            failed[at] |= ~largest.isfinite()

        if not sampling.all_greedy:
            random_rows = np.flatnonzero(~sampling.greedy)
            at_once = ROWS_AT_ONCE if device.type == "cpu" else random_rows.size
            for start in range(0, random_rows.size, at_once):
                some = random_rows[start : start + at_once]
                scores = logits[to_device(some, device)].float()
                _, taken, replaced = np.intersect1d(rows, some, assume_unique=True, return_indices=True)
                scores[to_device(replaced, device)] = adjusted[to_device(taken, device)].float()
                token_ids[to_device(some, device)] = self._draw(scores, some, batch)
        return Sampled(token_ids, failed, _logprobs(logits, token_ids, batch))

    def _draw(self, scores: torch.Tensor, rows: IntArray, batch: ForwardBatch) -> torch.Tensor:
        """int64 `[rows]`: a token for each of the batch's `rows`; `scores` are their float32 logits, overwritten.

        The limits narrow the distribution after temperature one after another: top-k; top-p over what top-k
        left; min-p, which compares with the likeliest token and so needs no renormalising.
        """
        sampling, vocab_size, device = batch.sampling, scores.shape[1], scores.device
        scores -= scores.amax(dim=-1, keepdim=True)
        scores /= to_device(sampling.temperature[rows, None], device)
        weights = scores.exp()
        keys = to_device(row_keys(sampling.seed[rows], batch.seq_lens[rows]), device)
        limits = Limits(
            top_k=to_device(np.minimum(sampling.top_k[rows], vocab_size), device),
            top_p=to_device(sampling.top_p[rows].astype(np.float64), device),
            min_p=to_device(sampling.min_p[rows, None], device),
        )
        is_limited = (sampling.top_k[rows] < vocab_size) | (sampling.top_p[rows] < 1)
        if is_limited.all():
            return self._kernels.draw_limited(scores, weights, keys, limits)

        tokens = torch.empty(rows.size, dtype=torch.int64, device=device)
        free = to_device(np.flatnonzero(~is_limited), device)
        tokens[free] = race(weights[free], limits.min_p[free], exponential_noise(keys[free], None, vocab_size))
        if is_limited.any():
            at = to_device(np.flatnonzero(is_limited), device)
            tokens[at] = self._kernels.draw_limited(scores[at], weights[at], keys[at], limits.at(at))
        return tokens


@dataclass(frozen=True)
class DeviceLogprobs:
    """Natural-log probabilities of some rows of a batch, `rows`."""

    rows: list[int]
    chosen: torch.Tensor
    """float32 [rows]"""
    top_ids: torch.Tensor
    """int64 [rows, most that any row asks for], likeliest first"""
    top: torch.Tensor
    """float32, likewise"""

    def to_host(self) -> DeviceLogprobs:
        return DeviceLogprobs(self.rows, _to_host(self.chosen), _to_host(self.top_ids), _to_host(self.top))

    def list_into(self, logprobs: list[TokenLogprob | None], top_nums: list[int | None], failed: BoolArray) -> None:
        """Sets the entries of these rows, but for failed ones, each with as many alternatives as it asked for."""
        values = zip(self.rows, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        for row, chosen, top_ids, top in values:
            if not failed[row]:
                logprobs[row] = TokenLogprob(chosen, tuple(zip(top_ids, top, strict=True))[: top_nums[row]])


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, batch: ForwardBatch) -> DeviceLogprobs | None:
    """Of the rows that emit a token and ask for its log-probability; None where there are none."""
    top_nums = batch.top_logprobs_nums or []
    rows = [row for row, top_num in enumerate(top_nums) if top_num is not None and batch.emits[row]]
    if not rows:
        return None
    at = to_device(np.array(rows), logits.device)
    raw = logits[at].float()
    normaliser = raw.logsumexp(dim=-1, keepdim=True)
    most = min(max(top_nums[row] or 0 for row in rows), raw.shape[1])
    top_ids = best_first(raw, most) if most else token_ids.new_empty(len(rows), 0)
    chosen = (raw.gather(1, token_ids[at, None]) - normaliser)[:, 0]
    return DeviceLogprobs(rows, chosen, top_ids, raw.gather(1, top_ids) - normaliser)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)
