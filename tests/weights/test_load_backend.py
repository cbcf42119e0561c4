"""A tokenizer for decoding alone: the one of `transformers`, mostly without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from shared.incremental_detokenizer import TextDecoder
from shared.weights import tokenizer as tokenizer_module
from shared.weights.errors import ModelPreparationError
from shared.weights.prepare import prepare_model
from shared.weights.tiny_random import write_tiny_random
from shared.weights.tokenizer import load_backend, load_tokenizer
from tests.frontend.tokenizers_for_tests import byte_level, metaspace, sentencepiece_like


def tiny_random(folder: Path) -> None:
    write_tiny_random(folder)


def change_config(folder: Path, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, **more}))


def cleaned_up(folder: Path) -> None:
    sentencepiece_like().save_pretrained(folder)
    change_config(folder, clean_up_tokenization_spaces=True)


def only_tokenizer_json(folder: Path) -> None:
    byte_level().backend_tokenizer.save(str(folder / "tokenizer.json"))


def listed_as_it_is(folder: Path) -> None:
    """As transformers 4 wrote it: every added token again in tokenizer_config.json."""
    metaspace().save_pretrained(folder)
    listed = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    change_config(folder, added_tokens_decoder={str(token.pop("id")): token for token in listed})


def only_listed(folder: Path) -> None:
    """Two tokens that only the list has, one of them special."""
    only_tokenizer_json(folder)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    listed = {
        str(size + special): {"content": f"<only {special}>", "special": bool(special), "normalized": not special}
        for special in (0, 1)
    }
    change_config(folder, added_tokens_decoder=listed)


def listed_as_special(folder: Path) -> None:
    """A token that only the list calls special."""
    only_tokenizer_json(folder)
    listed = {"263": {"content": "an added é", "special": True, "normalized": False}}
    change_config(folder, added_tokens_decoder=listed, eos_token="an added é")


def only_with_a_role(folder: Path) -> None:
    only_tokenizer_json(folder)
    change_config(folder, eos_token="<the end>", extra_special_tokens=["<more>"], image_token="<image>")


def with_a_role_and_attributes(folder: Path) -> None:
    only_tokenizer_json(folder)
    change_config(folder, eos_token={"__type": "AddedToken", "content": "<the end>", "special": True})


def special_tokens_map(folder: Path) -> None:
    only_tokenizer_json(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<from the map>"}}))


def added_tokens_file(folder: Path) -> None:
    only_tokenizer_json(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"<from the file>": 264}))


COMPLETE = (tiny_random, cleaned_up, only_tokenizer_json, listed_as_it_is)
INCOMPLETE = (
    *(only_listed, listed_as_special, only_with_a_role, with_a_role_and_attributes),
    *(special_tokens_map, added_tokens_file),
)


def assert_decodes_alike(ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    added = theirs.added_tokens_decoder
    assert {i: repr(token) for i, token in ours.get_added_tokens_decoder().items()} == {
        i: repr(token) for i, token in added.items()
    }
    assert TextDecoder(ours).special_ids == {i for i, token in added.items() if token.special}
    size = len(theirs)
    assert ours.get_vocab_size() == size

    @settings(max_examples=100, deadline=None)
    @given(ids=st.lists(st.integers(0, size + 5), max_size=20), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("write", [*COMPLETE, *INCOMPLETE])
def test_it_decodes_as_transformers_does(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    assert_decodes_alike(load_backend(tmp_path), load_tokenizer(tmp_path))


def test_that_of_the_default_model_does_too() -> None:
    folder = prepare_model("SmolLM2-135M-Instruct", show_progress=False)
    assert_decodes_alike(load_backend(folder), load_tokenizer(folder))


@pytest.mark.parametrize("write", [*COMPLETE, *INCOMPLETE])
def test_transformers_is_asked_only_where_it_would_add_a_token(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    asked = []

    def load(folder: Path) -> PreTrainedTokenizerFast:
        asked.append(folder)
        return load_tokenizer(folder)

    monkeypatch.setattr(tokenizer_module, "load_tokenizer", load)
    load_backend(tmp_path)
    assert bool(asked) == (write in INCOMPLETE)


def test_a_tokenizer_that_is_broken_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelPreparationError, match="does not exist"):
        load_backend(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelPreparationError, match=r"tokenizer\.json cannot be read"):
        load_backend(tmp_path)


def test_processes_that_only_decode_import_no_transformers() -> None:
    folder = prepare_model("tiny-random", show_progress=False)
    script = (
        "import sys, shared.detokenizer, shared.executor.rank, shared.weights.tokenizer as tokenizer; "
        f"tokenizer.load_backend({str(folder)!r}); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
