"""Weights are told apart by value, not by where they lie, and engines agree about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GraniteConfig

from cacheblend_rag.engines.identity import model_identity, weights_in_files
from cacheblend_rag.engines.transformers.watched_model import hash_in_memory
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
    assert weights_in_files(folder, dtype) == hash_in_memory(model, dtype)


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


KEYS = [3, -28, -28]


def test_precision_shard_and_keys_are_part_of_it(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    whole = model_identity("w", config, FLOAT32, keys=KEYS)
    assert whole == model_identity("w", config, FLOAT32, keys=tuple(KEYS))
    assert whole != model_identity("w", config, torch.bfloat16, keys=KEYS)
    assert whole != model_identity("w", config, FLOAT32, keys=KEYS, rank=0, ranks=2)
    assert whole != model_identity("w", config, FLOAT32, keys=[4, *KEYS[1:]])
    assert whole == model_identity("w", config, FLOAT32, keys=KEYS, precision="native")
    assert whole != model_identity("w", config, FLOAT32, keys=KEYS, precision="fp8")


GRANITE = GraniteConfig(embedding_multiplier=3.0, residual_multiplier=0.4)


@pytest.mark.parametrize(
    "changed",
    [
        {"embedding_multiplier": 6.0},
        {"residual_multiplier": 0.9},
        {"rms_norm_eps": 1e-1},
        {"sliding_window": 48},
        {"a_setting_nobody_has_heard_of": 1},
    ],
    ids=str,
)
def test_every_setting_counts_that_is_not_known_to_be_harmless(changed: dict[str, Any]) -> None:
    other = GraniteConfig(**{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, **changed})
    one, two = (model_identity("w", config, FLOAT32, keys=KEYS) for config in (GRANITE, other))
    assert one != two


def test_what_a_model_is_called_does_not_count() -> None:
    other = GraniteConfig(
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        eos_token_id=5,
        attention_dropout=0.5,
        architectures=["Another"],
        name_or_path="elsewhere",
    )
    one, two = (model_identity("w", config, FLOAT32, keys=KEYS) for config in (GRANITE, other))
    assert one == two


def test_what_cannot_be_told_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="no safetensors files"):
        weights_in_files(tmp_path / "empty", FLOAT32)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="adapter"):
        weights_in_files(folder, FLOAT32)


class Quantized(torch.Tensor):
    """A weight of codes and scales, as torchao's: nothing but its own operations is defined."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket.__name__ == "detach":
            return args[0]
        raise NotImplementedError(str(function))


def test_quantized_weights_are_told_apart_by_codes_and_scales() -> None:
    def hashed(code: int, scale: float) -> str:
        codes = torch.full((4, 4), code, dtype=torch.int8)
        model = nn.Module()
        model.weight = nn.Parameter(
            Quantized(codes, torch.full((4, 1), scale)), requires_grad=False
        )
        return hash_in_memory(model, FLOAT32)

    assert len({hashed(1, 0.5), hashed(2, 0.5), hashed(1, 0.25)}) == 3
    assert hashed(1, 0.5) == hashed(1, 0.5)
