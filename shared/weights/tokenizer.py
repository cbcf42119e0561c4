"""Reading and writing the tokenizer of a model folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from shared.weights.errors import ModelPreparationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(folder: str | Path, chat_template_file: str | Path | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer in `folder`, with its own chat template or the one in `chat_template_file`.

    The clean-up of spaces before punctuation that some tokenizers ask for is off: the text of a list of ids
    then begins with the text of each of its prefixes, which streaming needs.

    Raises ModelPreparationError when there is no tokenizer or template to read.
    """
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelPreparationError(f"{path} does not exist; the model needs a fast tokenizer")
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, clean_up_tokenization_spaces=False
        )
    except Exception as error:  # the tokenizers library raises plain Exception for a broken file
        raise ModelPreparationError(f"{path} cannot be read: {error}") from error
    if chat_template_file is not None:
        try:
            tokenizer.chat_template = Path(chat_template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelPreparationError(f"chat template {chat_template_file} cannot be read: {error}") from None
    return tokenizer


def import_transformers() -> None:
    """What `load_tokenizer` would import, which takes half a second: to be called while others work."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401


def load_backend(folder: str | Path) -> Tokenizer:
    """`load_tokenizer(folder).backend_tokenizer`, for processes that only decode: without transformers where
    tokenizer.json has all added tokens that the files beside it know of.

    Raises ModelPreparationError when there is no tokenizer to read.
    """
    folder = Path(folder)
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if _has_all_added_tokens(backend, folder):
            return backend
    except Exception:  # the tokenizers library raises plain Exception for a broken file
        pass  # load_tokenizer says what is wrong
    loaded: Tokenizer = load_tokenizer(folder).backend_tokenizer
    return loaded


def _has_all_added_tokens(backend: Tokenizer, folder: Path) -> bool:
    """Whether transformers would add no token to `backend`: none listed, none that a role is given to."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "added_tokens_decoder" not in config and any((folder / name).is_file() for name in _LEGACY_FILES):
        return False
    added = backend.get_added_tokens_decoder().values()
    listed = [AddedToken(**token) for token in config.get("added_tokens_decoder", {}).values()]
    if not set(map(repr, listed)) <= set(map(repr, added)):
        return False
    with_roles = [value for name, value in config.items() if name.endswith("_token")]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        more = config.get(name) or []
        with_roles += more.values() if isinstance(more, dict) else more
    contents = {token["content"] if isinstance(token, dict) else token for token in with_roles}
    return {content for content in contents if isinstance(content, str)} <= {token.content for token in added}


_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")


def save_tokenizer(
    folder: Path,
    backend: Tokenizer,
    special_tokens: dict[str, str],
    chat_template: str | None,
    model_max_length: int,
) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja.

    `special_tokens` maps roles ("eos_token", ...) to tokens.  Any transformers from version 4 on reads
    the files.
    """
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        **special_tokens,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
