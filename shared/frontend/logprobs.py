"""Log-probabilities of one choice, in the shapes of the chat and the completions route.

A token that is not part of the text (skipped, or the stop token that ended it) has no bytes, so that the
bytes of all tokens joined are the text, up to a stop string that was cut off.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from shared.frontend.generation import Output
from shared.incremental_detokenizer import TextDecoder
from shared.messages import SamplingParams

_LOWEST = -9999.0
"""What JSON, which has no infinity, says for a probability of zero."""


class LogprobFormatter:
    """Takes a choice's outputs in order."""

    def __init__(self, decoder: TextDecoder, params: SamplingParams) -> None:
        self._decoder = decoder
        self._params = params
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True

    def chat(self, output: Output) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(token_id, logprob, shown),
                    "top_logprobs": [
                        self._entry(other, value, self._decoder.token_bytes(other)) for other, value in top
                    ],
                }
                for token_id, logprob, top, shown in self._tokens(output)
            ],
            "refusal": None,
        }

    def completion(self, output: Output) -> dict[str, Any]:
        tokens: list[str] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token_id, logprob, top, shown in self._tokens(output):
            tokens.append(self.name(token_id))
            logprobs.append(finite(logprob))
            best: dict[str, float] = {}
            for other, value in (*top, (token_id, logprob)):
                best.setdefault(self.name(other), finite(value))
            tops.append(best)
            is_cut_short = self._utf8.getstate()[0] and shown and not _continues_character(shown)
            offsets.append(self._offset + bool(is_cut_short))
            self._offset += len(self._utf8.decode(shown))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def name(self, token_id: int) -> str:
        """The token as text; one that is no whole characters as OpenAI writes it, `bytes:\\xf0\\x9f`."""
        raw = self._decoder.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _entry(self, token_id: int, logprob: float, raw: bytes) -> dict[str, Any]:
        return {"token": self.name(token_id), "logprob": finite(logprob), "bytes": list(raw)}

    def _tokens(self, output: Output) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...], bytes]]:
        """Each token's id, log-probability, alternatives, and the bytes it has in the text."""
        reason = output.finish_reason
        matched = reason.matched if reason is not None and not self._params.no_stop_trim else None
        last = len(output.ids) - 1
        for place, (token_id, entry) in enumerate(zip(output.ids, output.logprobs, strict=True)):
            ends_text = place == last and isinstance(matched, int) and matched == token_id
            yield token_id, entry.logprob, entry.top, b"" if ends_text else self._bytes_in_text(token_id)

    def _bytes_in_text(self, token_id: int) -> bytes:
        decoder = self._decoder
        if self._params.skip_special_tokens and decoder.is_special(token_id):
            return b""
        raw = decoder.token_bytes(token_id)
        if self._is_first:
            self._is_first = False
            alone = decoder.decode([token_id], skip_special_tokens=False)
            if raw.startswith(b" ") and not alone.startswith(" "):
                return raw[1:]
        return raw


def _continues_character(raw: bytes) -> bool:
    return raw[0] & 0b1100_0000 == 0b1000_0000


def finite(logprob: float) -> float:
    """`logprob` as JSON can write it."""
    return max(logprob, _LOWEST)
