"""Small tokenizers of the two families that models have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FastTokenizer: Any = PreTrainedTokenizerFast  # its constructor has no types
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('starts with assistant') }}{% endif %}"
    "{% for m in messages %}<user>{{ m.role }}: {{ m.content }}{% endfor %}<assistant>"
)


def byte_level() -> Any:
    """A token per byte (ids 4 to 259), two merges, a token of half a character and one with spaces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["th", "the", "ðŁ"]
    vocab = {token: place for place, token in enumerate([*SPECIAL, *alphabet, *merged])}
    merges = [("t", "h"), ("th", "e"), ("ð", "Ł")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("an added é", special=False)])
    return FastTokenizer(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE)


def save_byte_level(folder: Path) -> None:
    byte_level().save_pretrained(folder)


def sentencepiece_like() -> Any:
    """Llama 2's make: spaces as U+2581, byte fallback, and a decoder that drops the space at the start."""
    pieces = ["\u2581", "\u2581a", "\u2581the", "a", "b", "lo", "\u2581\u2581", "世", ",", "é"]
    vocab = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    backend = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(vocab)},
            merges=[("\u2581", "a"), ("\u2581", "\u2581")],
            byte_fallback=True,
            unk_token="<pad>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return FastTokenizer(tokenizer_object=backend, eos_token="<eos>")


def metaspace() -> Any:
    """The other SentencePiece decoder: Metaspace, without byte fallback."""
    tokens = [*SPECIAL, "\u2581", "\u2581a", "\u2581the", "a", "lo"]
    vocab = {token: place for place, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return FastTokenizer(tokenizer_object=backend, eos_token="<eos>")
