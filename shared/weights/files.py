"""Tensors of a model folder by name, memory-mapped, so that a rank reads only its share from disk."""

from __future__ import annotations

import json
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from shared.weights.errors import ModelPreparationError
from shared.weights.model_config import read_json

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library


def weight_file_names(folder: Path) -> list[str]:
    """The safetensors files of a model folder, from its index where it has one.

    Raises ModelPreparationError when there are none, or when one that the index names is missing.
    """
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(_weight_map(folder).values()))
    elif (folder / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    elif any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelPreparationError(
            f"{folder} has PyTorch pickle files only; save the model as safetensors "
            "(save_pretrained of transformers does) and try again"
        )
    else:
        raise ModelPreparationError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelPreparationError(f"{folder} lacks {', '.join(missing)}, which {INDEX_FILE} names")
    return names


def check_weight_files(folder: Path) -> None:
    """Reads the headers alone.  Raises ModelPreparationError for a missing, truncated or foreign file."""
    for name in weight_file_names(folder):
        path = folder / name
        try:
            with path.open("rb") as file:
                (header_size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(header_size, _MAX_HEADER_BYTES)))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            expected = 8 + header_size + max(ends, default=0)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, struct.error):
            raise ModelPreparationError(f"{path} is not a safetensors file; fetch or convert it again") from None
        if path.stat().st_size != expected:
            raise ModelPreparationError(
                f"{path} has {path.stat().st_size} bytes where its header says {expected}; fetch it again"
            )


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelPreparationError(f"{folder / INDEX_FILE} has no weight_map")
    return weight_map


class WeightFiles:
    """The tensors of one model folder.  A context manager: the mappings end with it.

    Tensors from `get` stay valid after that; they hold their own reference to the mapping.
    """

    def __init__(self, folder: str | Path) -> None:
        """Opens the headers.  Raises ModelPreparationError for files that are missing or broken."""
        self._folder = Path(folder)
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for file_name in weight_file_names(self._folder):
            path = self._folder / file_name
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelPreparationError(f"{path} cannot be read: {error}") from None
            self._file_of.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        """A whole tensor, memory-mapped: reading it is what loads it."""
        tensor: torch.Tensor = self._handle(name).get_tensor(name)
        return tensor

    def get_slice(self, name: str) -> Any:
        """A safetensors slice: index it like a tensor to read that part, `get_shape()` for its shape."""
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        try:
            return self._file_of[name]
        except KeyError:
            raise ModelPreparationError(
                f"{self._folder} has no tensor {name!r}; the checkpoint is incomplete"
            ) from None
