"""The tokenizer that a .gguf file describes, as tokenizer files in Hugging Face layout.

Built here from the metadata, and not by transformers' converter, because that one does not know SmolLM2's
rule of single digits (`tokenizer.ggml.pre` = "smollm") and takes GPT-2's instead, which makes of " ½" other
tokens than the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared.weights.tokenizer import save_tokenizer

_CONTROL: Final = 3  # of tokenizer.ggml.token_type
_USER_DEFINED: Final = 4

# How text is cut before merging, by `tokenizer.ggml.pre`: the patterns of the models' own tokenizer.json.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_PATTERNS: Final = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_GPT2_STYLE: Final = ("default", "gpt-2")
# A word that is in the vocabulary becomes that token, whatever the merges would make of it.
_WHOLE_WORDS_FIRST: Final = ("llama-bpe", "llama3", "llama-v3", "tekken")
_ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_gguf_tokenizer(metadata: Mapping[str, Any], folder: Path, model_max_length: int) -> None:
    """Writes the tokenizer files into `folder`.  Raises KeyError or ValueError if it cannot."""
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        backend = _byte_level(metadata)
    elif kind == "llama":
        backend = _sentencepiece(metadata)
    else:
        raise ValueError(f"tokenizer {kind!r} is not supported; supported are gpt2 and llama")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])

    ids = {role: metadata.get(f"tokenizer.ggml.{key}") for role, key in _ROLES.items()}
    roles = {role: tokens[index] for role, index in ids.items() if index is not None}
    _add_ends(backend, metadata, roles)
    save_tokenizer(folder, backend, roles, metadata.get("tokenizer.chat_template"), model_max_length)


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    """BPE on bytes, as GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    kind = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab=_vocab(metadata), merges=merges, ignore_merges=kind in _WHOLE_WORDS_FIRST))
    steps: list[Any]
    if kind == "smollm":
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    elif kind in _GPT2_STYLE:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif kind in _PATTERNS:
        cut = pre_tokenizers.Split(Regex(_PATTERNS[kind]), behavior="isolated")
        steps = [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        known = ", ".join(["smollm", *_GPT2_STYLE, *_PATTERNS])
        raise ValueError(f"tokenizer.ggml.pre {kind!r} is not supported; supported are {known}")
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """BPE on characters with single bytes to fall back on, as Llama 1 and 2 and early Mistrals have it."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=_vocab(metadata),
        merges=_merges_of_scores(tokens, metadata["tokenizer.ggml.scores"]),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merges_of_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: sentencepiece keeps scores, not merges."""
    index_of = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in index_of and right in index_of:
                merges.append((-score, index_of[left], index_of[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(merges)]


def _add_ends(backend: Tokenizer, metadata: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    """Has the tokenizer put BOS before and EOS after a text, where the file asks for it.

    Where the file is silent, llama.cpp's habit holds: BOS for sentencepiece, Llama 3 and Tekken vocabularies.
    """
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    by_habit = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    wanted = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", by_habit),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {role: roles[role] for role, is_wanted in wanted.items() if is_wanted and role in roles}
    if not ends:
        return
    before = f"{ends['bos_token']} " if "bos_token" in ends else ""
    after = f" {ends['eos_token']}" if "eos_token" in ends else ""
    special = [(token, metadata[f"tokenizer.ggml.{_ROLES[role]}"]) for role, token in ends.items()]
    template = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} {before}$B:1{after}",
        special_tokens=special,
    )
    byte_level = [] if is_sentencepiece else [processors.ByteLevel(trim_offsets=False)]
    backend.post_processor = processors.Sequence([*byte_level, template])
