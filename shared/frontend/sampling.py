"""Request fields to `SamplingParams`."""

from __future__ import annotations

import secrets

from shared.frontend.errors import invalid
from shared.frontend.limits import Limits
from shared.frontend.prompts import check_token_id
from shared.frontend.protocol import SamplingFields
from shared.messages import SamplingParams

_SEED_MASK = 2**63 - 1


def sampling_params(
    fields: SamplingFields,
    limits: Limits,
    *,
    prompt_tokens: int,
    max_new_tokens: int | None,
    min_new_tokens: int = 0,
    seed: int | None = None,
    choice: int = 0,
    at: str = "",
) -> SamplingParams:
    """Checked settings of one request; ApiError 400 names a field after the prefix `at`.

    `max_new_tokens` (None: all that fit) is cut to what the context and the KV pool leave beside the prompt:
    such a request ends with "length".  A request without a seed gets a random one; choice k of a prompt has
    seed + k.
    """
    room = limits.max_request_tokens - prompt_tokens
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise invalid(at + "min_tokens", f"{min_new_tokens} is above the {max_new_tokens} tokens asked for")
    if fields.top_k == 0:
        raise invalid(at + "top_k", "must be -1 (all) or at least 1 (got 0)")
    vocab_size = limits.vocab_size
    for place, token_id in enumerate(fields.stop_token_ids):
        check_token_id(token_id, vocab_size, f"{at}stop_token_ids[{place}]")
    base = secrets.randbits(63) if seed is None else seed
    new_tokens = room if max_new_tokens is None else min(max_new_tokens, room)
    return SamplingParams(
        max_new_tokens=new_tokens,
        min_new_tokens=min(min_new_tokens, new_tokens),
        temperature=fields.temperature,
        top_k=fields.top_k if fields.top_k < vocab_size else -1,
        top_p=fields.top_p,
        min_p=fields.min_p,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        repetition_penalty=fields.repetition_penalty,
        seed=(base + choice) & _SEED_MASK,
        stop=tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        logit_bias=_logit_bias(fields.logit_bias, vocab_size, at + "logit_bias"),
        skip_special_tokens=fields.skip_special_tokens,
        no_stop_trim=fields.no_stop_trim,
    )


def _logit_bias(biases: dict[str, float], vocab_size: int, param: str) -> tuple[tuple[int, float], ...]:
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            raise invalid(param, f"{ascii(key)[:40]} is not a token id from 0 to {vocab_size - 1}")
        checked[int(key)] = bias
    return tuple(checked.items())
