"""Logits in, one token per row out."""

from __future__ import annotations

import numpy as np
import torch

from shared.executor.forward_batch import ForwardBatch, ForwardResult, SamplingBatch
from shared.layers.adjust_logits import adjust_logits
from shared.layers.noise import exponential_noise, row_keys
from shared.messages import IntArray, TokenLogprob

CANDIDATES = 1024
"""How many of the likeliest tokens are sorted at first: enough for nearly every top-k and top-p."""
ROWS_AT_ONCE = 16
"""Random rows worked on together: their temporaries stay in a CPU's cache, and small beside the logits."""


class Sampler:
    """Chooses the next token of every row of a batch; a row's choice never depends on its neighbours.

    A greedy row takes the lowest id among its largest logits.  A random row holds a race: token t arrives at
    `E_t / p_t`, with Exp(1) noise `E_t` keyed by the row's seed, the position to be filled and t; the first
    to arrive is distributed as p.  Unlike an inverse CDF this does not turn the last bits of a sum over the
    vocabulary, which move with the batch size, into another token.
    """

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, batch: ForwardBatch) -> ForwardResult:
        """Samples from `logits`, `[bs, vocab]` in any float type, which are left as they are.

        Adds each token to its row's `TokenCounts`, unless the row emits none.  A row is marked `failed` if
        its largest logit is NaN or infinite, before or after adjustment: it has no distribution to choose
        from.  Log-probabilities are those of the logits as given; failed rows and rows that emit nothing have
        none.
        """
        sampling = batch.sampling
        largest, token_ids = logits.max(dim=-1)
        failed = ~largest.isfinite()

        rows, adjusted = np.empty(0, np.int64), logits[:0]
        if sampling.any_adjustment:
            rows, adjusted = adjust_logits(logits, batch)
        if rows.size:
            at = _index(rows, logits.device)
            largest, token_ids[at] = adjusted.max(dim=-1)
            failed[at] |= ~largest.isfinite()

        if not sampling.all_greedy:
            random_rows = np.flatnonzero(~sampling.greedy)
            for start in range(0, random_rows.size, ROWS_AT_ONCE):
                some = random_rows[start : start + ROWS_AT_ONCE]
                scores = logits[_index(some, logits.device)].float()
                _, taken, replaced = np.intersect1d(rows, some, assume_unique=True, return_indices=True)
                scores[_index(replaced, logits.device)] = adjusted[_index(taken, logits.device)].float()
                token_ids[_index(some, logits.device)] = _draw(scores, some, batch)

        next_token_ids = token_ids.cpu().numpy()
        failed_rows = failed.cpu().numpy()
        if sampling.any_adjustment:
            for row, counts in enumerate(sampling.counts):
                if counts is not None and batch.emits[row]:
                    counts.add(int(next_token_ids[row]))
        logprobs = None
        if batch.top_logprobs_nums is not None:
            wanted = [
                None if failed_rows[row] or not batch.emits[row] else top_num
                for row, top_num in enumerate(batch.top_logprobs_nums)
            ]
            logprobs = _logprobs(logits, token_ids, wanted)
        return ForwardResult(next_token_ids, logprobs, failed_rows if failed_rows.any() else None)


def _draw(scores: torch.Tensor, rows: IntArray, batch: ForwardBatch) -> torch.Tensor:
    """int64 `[rows]`: a token for each of the batch's `rows`; `scores` are their float32 logits, overwritten.

    The limits narrow the distribution after temperature one after another: top-k; top-p over what top-k left;
    min-p, which compares with the likeliest token and so needs no renormalising.
    """
    sampling, vocab_size, device = batch.sampling, scores.shape[1], scores.device
    scores -= scores.amax(dim=-1, keepdim=True)
    scores /= torch.from_numpy(sampling.temperature[rows, None]).to(device)
    weights = scores.exp()
    keys = row_keys(sampling.seed[rows], batch.seq_lens[rows]).to(device)
    min_p = torch.from_numpy(sampling.min_p[rows, None]).to(device)
    tokens = torch.empty(rows.size, dtype=torch.int64, device=device)

    limited = (sampling.top_k[rows] < vocab_size) | (sampling.top_p[rows] < 1)
    open_rows = _index(np.flatnonzero(~limited), device)
    if len(open_rows):
        noise = exponential_noise(keys[open_rows], None, vocab_size)
        tokens[open_rows] = _race(weights[open_rows], min_p[open_rows], noise)

    left = np.flatnonzero(limited)
    for width in (min(CANDIDATES, vocab_size), vocab_size):
        if left.size:
            at = _index(left, device)
            best, ids, short = _candidates(scores[at], weights[at], rows[left], sampling, width)
            noise = exponential_noise(keys[at], ids, vocab_size)
            tokens[at] = ids.gather(1, _race(best, min_p[at], noise)[:, None])[:, 0]
            left = left[short.cpu().numpy()]
    return tokens


def _race(weights: torch.Tensor, min_p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """int64 `[rows]`: the winning column of each row; `weights` are probabilities over the largest one."""
    return weights.masked_fill(weights < min_p, 0).div_(noise).argmax(dim=-1)


def _candidates(
    scores: torch.Tensor, weights: torch.Tensor, rows: IntArray, sampling: SamplingBatch, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights (zero outside top-k and top-p) and ids of each row's `width` best, and which rows need more.

    The first two are `[rows, width]`, best first; the third is bool `[rows]`.
    """
    vocab_size, device = scores.shape[1], scores.device
    ids = best_first(scores, width)
    best = weights.gather(1, ids)
    reached = best.cumsum(dim=-1, dtype=torch.float64)
    top_k = torch.from_numpy(sampling.top_k[rows, None]).to(device)
    top_p = torch.from_numpy(sampling.top_p[rows, None].astype(np.float64)).to(device)

    unlimited = top_k >= vocab_size
    whole = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(unlimited, whole, reached.gather(1, top_k.clamp(max=width) - 1))
    # A token is in while the mass before it falls short of p: the smallest set that reaches p.
    in_top_p = (reached - best < mass * top_p).sum(dim=-1, keepdim=True)
    kept = in_top_p.minimum(top_k).clamp_(min=1)
    best.masked_fill_(torch.arange(width, device=device) >= kept, 0)
    short = (top_k.clamp(max=vocab_size) > width) & ((in_top_p >= width) | ~unlimited)
    return best, ids, short[:, 0]


def best_first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 `[rows, count]`: columns of the largest float32 `scores`, largest first, ties by column."""
    # One int64 orders by both: the score's bits, made monotone, above the column counted backwards.
    bits = (scores + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys <<= 32
    keys |= torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    if keys.device.type != "cpu":
        return keys.topk(count).indices
    # NumPy's vectorised sorts of plain integers take a third of the time of torch's, which carry indices.
    array = keys.numpy()
    if count < array.shape[1]:
        array.partition(array.shape[1] - count)
        array = array[:, -count:]
    array.sort()
    return torch.from_numpy(scores.shape[1] - 1 - (array[:, ::-1] & 0xFFFFFFFF))


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top_nums: list[int | None]) -> list[TokenLogprob | None]:
    """Natural-log probabilities of the rows with a number in `top_nums`, with that many alternatives."""
    logprobs: list[TokenLogprob | None] = [None] * len(top_nums)
    rows = [row for row, top_num in enumerate(top_nums) if top_num is not None]
    if not rows:
        return logprobs
    at = torch.tensor(rows, device=logits.device)
    raw = logits[at].float()
    normaliser = raw.logsumexp(dim=-1, keepdim=True)
    chosen = (raw.gather(1, token_ids[at, None]) - normaliser)[:, 0].tolist()
    most = min(max(top_nums[row] or 0 for row in rows), raw.shape[1])
    ids = best_first(raw, most) if most else token_ids.new_empty(len(rows), 0)
    best = (raw.gather(1, ids) - normaliser).tolist()
    for row, logprob, top_ids, top_logprobs in zip(rows, chosen, ids.tolist(), best, strict=True):
        top = tuple(zip(top_ids, top_logprobs, strict=True))
        logprobs[row] = TokenLogprob(logprob, top[: top_nums[row]])
    return logprobs


def _index(rows: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows).to(device)
