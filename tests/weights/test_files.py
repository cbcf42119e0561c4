"""Reading weights by name and by slice, whole and sharded, and refusing what is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.weights.errors import ModelPreparationError
from shared.weights.files import INDEX_FILE, SINGLE_FILE, WeightFiles, check_weight_files
from tests.weights.gguf_files import random_model


@pytest.fixture(params=["single", "sharded"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    random_model("llama").save_pretrained(tmp_path, max_shard_size="1MB" if request.param == "sharded" else "1GB")
    assert (tmp_path / INDEX_FILE).exists() == (request.param == "sharded")
    return tmp_path


def test_tensors_and_slices_are_those_that_were_saved(folder: Path) -> None:
    expected = random_model("llama").state_dict()
    with WeightFiles(folder) as files:
        assert files.names() == sorted(expected)
        for name, tensor in expected.items():
            assert name in files
            assert torch.equal(files.get(name), tensor)
        name = "model.layers.1.self_attn.q_proj.weight"
        part = files.get_slice(name)
        assert part.get_shape() == list(expected[name].shape)
        assert torch.equal(part[32:64], expected[name][32:64])
        assert torch.equal(part[:, 3:5], expected[name][:, 3:5])
    check_weight_files(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    files = WeightFiles(folder)
    assert "model.layers.9.x" not in files
    for read in (files.get, files.get_slice):
        with pytest.raises(ModelPreparationError, match=r"model\.layers\.9\.x.*incomplete"):
            read("model.layers.9.x")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path, max_shard_size="1MB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelPreparationError, match=shard.name):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "longer", "foreign", "empty"])
def test_a_damaged_file_is_named(damage: str, folder: Path) -> None:
    path = sorted(folder.glob("model*.safetensors"))[0]
    contents = path.read_bytes()
    damaged = {
        "truncated": contents[:-4096],
        "longer": contents + bytes(10),
        "foreign": b"version https://git-lfs.github.com/spec/v1\n",
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    for check in (WeightFiles, check_weight_files):
        with pytest.raises(ModelPreparationError, match=path.name):
            check(folder)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelPreparationError, match="safetensors"):
        WeightFiles(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelPreparationError, match=SINGLE_FILE):
        check_weight_files(tmp_path)
