"""Weights are told apart by value, not by where they lie, and engines agree about them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend_rag.engines.identity import model_identity, weights_in_files, weights_in_memory
from cacheblend_rag.errors import ModelLoadError
from tests.models import save_model

FLOAT32 = torch.float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model("llama", tmp_path / "model", head_dim=64)
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_files_and_memory_agree(folder: Path, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert weights_in_files(folder, dtype) == weights_in_memory(model, dtype)


def test_shards_and_places_do_not_matter(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=FLOAT32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_in_files(tmp_path / "shards", FLOAT32) == weights_in_files(folder, FLOAT32)


def test_other_values_and_other_names_are_another_model(folder: Path) -> None:
    before = weights_in_files(folder, FLOAT32)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    changed = {name: tensor + 1e-3 for name, tensor in tensors.items()}
    save_file(changed, path, {"format": "pt"})
    other = weights_in_files(folder, FLOAT32)
    renamed = {f"{name}.copy": tensor for name, tensor in tensors.items()}
    save_file(renamed, path, {"format": "pt"})
    assert len({before, other, weights_in_files(folder, FLOAT32)}) == 3


def test_precision_and_shard_are_part_of_it(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    whole = model_identity("w", config, FLOAT32)
    assert whole != model_identity("w", config, torch.bfloat16)
    assert whole != model_identity("w", config, FLOAT32, rank=0, ranks=2)


def test_what_cannot_be_told_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="no safetensors files"):
        weights_in_files(tmp_path / "empty", FLOAT32)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="adapter"):
        weights_in_files(folder, FLOAT32)
