"""Token ids to text, a few at a time, with the same result as one decode of them all.

Used by the detokenizer (text of a stream, stop strings trimmed) and by the scheduler (has a stop string come
up?), so that both see the same text.  "One decode" is the tokenizer's own, without clean-up of spaces.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    """The text of one request's tokens."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, without what later tokens may still change."""
        ...

    def tail(self) -> str:
        """The text held back so far, as it would read if no token followed.  Changes nothing."""
        ...


class TextDecoder:
    """The tables of one tokenizer, shared by all requests of a process."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = _decoder_kinds(backend.decoder)
        self._is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in kinds
        byte_ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self._byte_ids = frozenset(byte_ids if self.has_byte_fallback else ())
        self._bytes: dict[int, bytes] = {}

    def stream(self, skip_special_tokens: bool) -> TokenStream:
        """A fresh stream for one request."""
        if self._is_byte_level:
            return _ByteLevelStream(self, skip_special_tokens)
        return _WindowStream(self, skip_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a SentencePiece byte fallback."""
        return token_id in self._byte_ids

    def has_token(self, token_id: int) -> bool:
        """False for the ids that a model's vocabulary has beyond its tokenizer's; they have no text."""
        return self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for inside a text; empty for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                return token.encode()
        if self.is_byte(token_id):
            return bytes([int(token[3:5], 16)])
        # A decoder may drop the space that starts a text: doubled, the second copy has it.
        once = self.decode([token_id], skip_special_tokens=False)
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :].encode()


class _ByteLevelStream:
    """Byte-level BPE: every token is a few bytes, and the text is their UTF-8."""

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skips_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        decoder = self._decoder
        if self._skips_special:
            ids = [token_id for token_id in ids if not decoder.is_special(token_id)]
        return self._utf8.decode(b"".join([decoder.token_bytes(token_id) for token_id in ids]))

    def tail(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", "replace")


class _WindowStream:
    """Any other decoder: the text of a short window of the newest tokens, less the text already given out.

    A window starts with tokens whose text is known, because a decoder may treat a text's first token apart
    (SentencePiece drops its leading space).  With byte fallback a run of byte tokens is decoded as a whole,
    and all of it turns into replacement characters if any of it is not UTF-8, so a run waits for its end.
    """

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skips_special = skip_special_tokens
        self._window: list[int] = []
        self._read = 0
        """Tokens of the window whose text is given out."""
        self._known = ""
        """The text of those tokens, decoded alone."""
        self._run = 0
        """Byte tokens at the end of the window."""

    def push(self, ids: Sequence[int]) -> str:
        decoder = self._decoder
        for token_id in ids:
            if (self._skips_special and decoder.is_special(token_id)) or not decoder.has_token(token_id):
                continue
            self._window.append(token_id)
            self._run = self._run + 1 if decoder.is_byte(token_id) else 0
        stable = len(self._window) - self._run
        if stable <= self._read:
            return ""
        text = self._decode(self._window[:stable])
        if text.endswith(_REPLACEMENT) and not decoder.has_byte_fallback:
            return ""
        delta = text[len(self._known) :]
        newest = self._decode(self._window[self._read : stable])
        if newest:
            self._window = self._window[self._read :]
            self._read, self._known = stable - self._read, newest
        else:
            self._read, self._known = stable, text
        return delta

    def tail(self) -> str:
        return self._decode(self._window)[len(self._known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=False)


def earliest_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string begins, and which it is; of several that begin there, the first listed."""
    found: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop)
        if at >= 0 and (found is None or at < found[0]):
            found = at, stop
    return found


class StopFinder:
    """Says at which token of one request a stop string has come up: the scheduler's side.

    Agrees with `StopTrimmer`: the text of the tokens up to that one contains the stop string, and the text of
    fewer tokens contains none.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str], skip_special_tokens: bool) -> None:
        self._stream = decoder.stream(skip_special_tokens)
        self._stops = stops
        self._overlap = max(map(len, stops)) - 1
        self._recent = ""

    def push(self, token_id: int) -> str | None:
        """Takes the newest token; the stop string that it completed, if any."""
        text = self._recent + self._stream.push((token_id,))
        found = earliest_stop(text + self._stream.tail(), self._stops)
        self._recent = text[max(0, len(text) - self._overlap) :]
        return found[1] if found else None


class StopTrimmer:
    """Cuts a stream of text before the first stop string: the detokenizer's side."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._is_over = False

    def push(self, text: str, *, final: bool) -> str:
        """What may be shown of the text so far: nothing that is, or may become, part of a stop string."""
        if self._is_over:
            return ""
        text = self._held + text
        found = earliest_stop(text, self._stops)
        if found:
            self._is_over = True
            return text[: found[0]]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _decoder_kinds(decoder: Any) -> list[str]:
    """The types of a tokenizer's decoder, in order; `[]` for a tokenizer without one."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    if state["type"] == "Sequence":
        return [part["type"] for part in state["decoders"]]
    return [state["type"]]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte, inverted: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
