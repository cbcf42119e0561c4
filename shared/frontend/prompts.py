"""Prompts to token ids, checked against what the engine can take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from shared import trace
from shared.frontend.errors import invalid, shown
from shared.frontend.limits import Limits
from shared.incremental_detokenizer import TextDecoder
from shared.messages import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LONG_CHARS = 8192
"""Texts of more characters are tokenized in a thread, so that the event loop goes on."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Prompt:
    """A checked prompt.  `text` is what the client wrote, None where it gave ids."""

    input_ids: IntArray
    text: str | None


class PromptEncoder:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, limits: Limits) -> None:
        self.decoder = TextDecoder(tokenizer.backend_tokenizer)
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._limits = limits
        self._trace = trace.track()

    async def from_texts(self, texts: Sequence[str], params: Sequence[str], rids: Sequence[str]) -> list[Prompt]:
        """One prompt per text; `params` are the fields' names, `rids` the requests to be.  Raises ApiError 400."""
        for text, param in zip(texts, params, strict=True):
            check_text(text, param)

        def encode() -> list[list[int]]:
            start_ns = self._trace.now()
            encodings = self._backend.encode_batch(list(texts))
            self._trace.span("tokenize", start_ns, rids=rids)
            return [encoding.ids for encoding in encodings]

        encoded = await self._off_loop_if_long(encode, sum(map(len, texts)))
        return [
            Prompt(self._checked(ids, param), text) for text, ids, param in zip(texts, encoded, params, strict=True)
        ]

    async def from_ids(self, lists: Sequence[list[Any]], params: Sequence[str]) -> list[Prompt]:
        """One prompt per list of ids that a client gave.  Raises ApiError 400."""

        def check() -> list[Prompt]:
            return [Prompt(self._checked(ids, param), None) for ids, param in zip(lists, params, strict=True)]

        return await self._off_loop_if_long(check, sum(map(len, lists)))

    def text_of(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.decoder.decode(prompt.input_ids.tolist(), skip_special_tokens=False)

    async def from_messages(self, messages: list[dict[str, str]], rids: Sequence[str]) -> Prompt:
        """A chat for the requests `rids`, through the model's own template.  Raises ApiError 400."""
        if not self._tokenizer.chat_template:
            raise invalid("messages", "the model has no chat template; start with --chat-template")

        def render() -> tuple[str, list[int]]:
            start_ns = self._trace.now()
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert isinstance(text, str)
            ids = self._backend.encode_batch([text], add_special_tokens=False)[0].ids
            self._trace.span("tokenize", start_ns, rids=rids)
            return text, ids

        length = sum(len(message["content"]) for message in messages)
        try:
            text, ids = await self._off_loop_if_long(render, length)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise invalid("messages", f"the model's chat template refuses them: {error}") from None
        return Prompt(self._checked(ids, "messages"), text)

    def _checked(self, ids: list[Any], param: str) -> IntArray:
        limits = self._limits
        if not ids:
            raise invalid(param, "is empty: it has no tokens")
        if len(ids) > limits.context_length - 1:
            raise invalid(
                param,
                f"{len(ids)} tokens do not fit: the context length is {limits.context_length}, and one token "
                "must be left for the answer",
            )
        if len(ids) > limits.max_total_num_tokens - 1:
            raise invalid(
                param,
                f"{len(ids)} tokens can never fit: the KV pool has room for {limits.max_total_num_tokens} "
                "(--max-total-tokens), and one must be left for the answer",
            )
        for place, token_id in enumerate(ids):
            check_token_id(token_id, limits.vocab_size, f"{param}[{place}]")
        return np.asarray(ids, dtype=np.int64)

    @staticmethod
    async def _off_loop_if_long(work: Callable[[], T], length: int) -> T:
        return await asyncio.to_thread(work) if length > _LONG_CHARS else work()


def check_token_id(value: Any, vocab_size: int, param: str) -> int:
    """`value`, if it is a token of the model; else ApiError 400."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(param, f"must be a token id, an integer (got {shown(value)})")
    if not 0 <= value < vocab_size:
        raise invalid(param, f"must be from 0 to {vocab_size - 1} (got {shown(value)})")
    return value


def check_text(value: Any, param: str) -> str:
    """`value`, if it is a string of whole characters; else ApiError 400.

    JSON can write half a surrogate pair, and no tokenizer can read it.
    """
    if not isinstance(value, str):
        raise invalid(param, f"must be a string (got {shown(value)})")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            problem = f"is not Unicode: half a surrogate pair at character {error.start}"
            raise invalid(param, problem) from None
    return value
