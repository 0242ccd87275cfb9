"""Models of real dimensions with random weights, on which speed is measured.

``python -m tests.benchmarks.shapes NAME FOLDER`` saves one, for `bench ttft FOLDER` and `serve`.

The dimensions are those of the published models' ``config.json``. Weights are not downloaded, so
answers mean nothing; the tokenizer has one token per word, so that token counts are exact.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

from cacheblend_rag.bench.workload import to_chunks
from cacheblend_rag.engines.transformers.loading import named_dtype
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import Chunk
from tests.toy import TOY as TOY_FOLDER

_WEIGHT_SCALE = 0.02


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of one model; ``rope`` holds its rotary parameters."""

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    max_positions: int
    rope: Mapping[str, Any]
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_size(self) -> int:
        """Components of a key."""
        return self.hidden // self.heads

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the size of ``tokens`` tokens' keys and values in all layers, in bytes."""
        return tokens * self.layers * 2 * self.kv_heads * self.head_size * dtype.itemsize

    def build_model(
        self, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> PreTrainedModel:
        """Return the model with seeded random weights, in evaluation mode."""
        with torch.device(device), no_init_weights():
            model = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
        model.tie_weights()
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _fill(name, weight, generator)
        return model.eval()

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer whose words are ``t0``, ``t1``, ...: one token each, no BOS."""
        words = {f"t{index}": index for index in range(self.vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=self.max_positions
        )

    def save(self, folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Save the random model, and the toy's tokenizer, to a folder in the hub's format."""
        self.build_model(dtype=dtype, device=device).save_pretrained(folder)
        AutoTokenizer.from_pretrained(TOY_FOLDER).save_pretrained(folder)

    def config(self) -> Any:
        """Return the model's configuration, without special tokens."""
        return AutoConfig.for_model(
            self.model_type,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.norm_eps,
            tie_word_embeddings=self.tied_embeddings,
            rope_parameters=dict(self.rope),
            bos_token_id=None,
            eos_token_id=None,
            **self.extra,
        )


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if weight.dim() > 1:
        weight.normal_(0.0, _WEIGHT_SCALE, generator=generator)
    elif name.endswith("bias"):
        weight.zero_()
    else:
        weight.fill_(1.0)


def _default_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LARGE: Mapping[str, Any] = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14_336,
    "tied_embeddings": False,
}  # fmt: skip
_SHAPES = (
    ModelShape("smollm2-135m", "llama", 30, 576, 9, 3, 1536, 49152, 8192, _default_rope(1e5)),
    ModelShape("smollm2-360m", "llama", 32, 960, 15, 5, 2560, 49152, 8192, _default_rope(1e5)),
    ModelShape(
        "qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 4864, 151_936, 32_768, _default_rope(1e6), 1e-6
    ),
    ModelShape(
        "llama-3.2-1b", "llama", 16, 2048, 32, 8, 8192, 128_256, 131_072, _llama3_rope(32.0)
    ),
    ModelShape(
        "mistral-7b", "mistral", vocabulary=32_000, max_positions=32_768, rope=_default_rope(1e6),
        extra={"sliding_window": None}, **_LARGE,
    ),
    ModelShape(
        "llama-3.1-8b", "llama", vocabulary=128_256, max_positions=131_072,
        rope=_llama3_rope(8.0), **_LARGE,
    ),
)  # fmt: skip
SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in _SHAPES}

TOY = ModelShape("toy", "llama", 4, 128, 4, 2, 256, 512, 2048, _default_rope(1e4))
"""A shape of no published model, on which a benchmark itself is tested."""


def named_shape(name: str) -> ModelShape:
    """Return the shape called ``name``; raises ConfigError, listing the known ones."""
    if name not in SHAPES:
        raise ConfigError(f"shape={name!r} must be one of {', '.join(SHAPES)}")
    return SHAPES[name]


def draw_words(rng: random.Random, count: int, vocabulary: int) -> str:
    """Return a text of exactly ``count`` tokens of a shape's tokenizer."""
    return "".join(f"t{rng.randrange(vocabulary)} " for _ in range(count))


def draw_chunks(
    rng: random.Random, chunks: int, tokens: int, vocabulary: int, *, selector: str, name: str
) -> list[Chunk]:
    """Return chunks of ``tokens`` random one-token words; selector, name: see ``to_chunks``."""
    texts = [draw_words(rng, tokens, vocabulary) for _ in range(chunks)]
    return to_chunks(texts, selector=selector, name=name, separator=" ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    named_shape(asked.name).save(asked.folder, dtype=named_dtype(asked.dtype), device=asked.device)
