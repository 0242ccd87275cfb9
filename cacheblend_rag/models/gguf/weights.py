"""Converts the weights of a GGUF file to safetensors.

Floating-point weights keep their precision. Quantized ones are stored in bfloat16: that rounds each
by less than one part in 256 and, as with published checkpoints, makes them the same for engines of
any precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.errors import first_line
from cacheblend_rag.models.gguf.header import (
    HUB_FORMAT,
    ROPE_FACTORS,
    CannotConvertError,
    GgufHeader,
)
from cacheblend_rag.models.gguf.settings import check_settings, put_rope_factors

NOT_ALL = "transformers does not read all weights of this GGUF"
NOT_OF_THE_MODEL = {"quantization_config", "_name_or_path"}


def save_weights(file: Path, header: GgufHeader, folder: Path, end_tokens: Sequence[int]) -> None:
    """Write a GGUF file's config and weights into a folder.

    file: in a folder of its own, since transformers loads the adapter that an adapter_config.json
    beside it names. end_tokens: end an answer, for the generation config. Raises CannotConvertError
    when transformers does not know the architecture, or would ignore weights or settings.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = stored_dtype(header)
    model = _read(file, header, dtype)
    plain = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in NOT_OF_THE_MODEL
    }
    config = type(model.config).from_dict(plain)
    put_rope_factors(config, header)
    check_settings(config, header)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    whole.load_state_dict(model.state_dict(), assign=True)
    whole.tie_weights()
    whole.generation_config = GenerationConfig(
        bos_token_id=header.special_token("bos"),
        eos_token_id=end_tokens[0] if len(end_tokens) == 1 else list(end_tokens) or None,
        pad_token_id=header.special_token("padding"),
    )
    whole.save_pretrained(folder)


def stored_dtype(header: GgufHeader) -> torch.dtype:
    """Return the precision that weights are stored in."""
    if header.quantized or "BF16" in header.types:
        return torch.bfloat16
    return torch.float16 if "F16" in header.types else torch.float32


def _read(file: Path, header: GgufHeader, dtype: torch.dtype) -> Any:
    """Load the model, after its config has proved to describe as many weights as the file holds."""
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name}
    auto = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, **options)
        with torch.device("meta"):
            described = auto.from_config(config, dtype=dtype)
        _check_number(described, header)
        if (quantization := getattr(transformers, "GgufConfig", None)) is not None:
            options["quantization_config"] = quantization(dequantize=True)
        model, found = auto.from_pretrained(
            file.parent, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except CannotConvertError:
        raise
    except Exception as error:  # the library's own, of many kinds
        raise CannotConvertError(
            f"transformers does not convert this GGUF ({first_line(error)}): {HUB_FORMAT}"
        ) from error
    for name in (*found["missing_keys"], *found["mismatched_keys"]):
        raise CannotConvertError(f"{NOT_ALL} (no {name}): {HUB_FORMAT}")
    return model


def _check_number(model: torch.nn.Module, header: GgufHeader) -> None:
    expected = sum(size for name, size in header.tensors.items() if name != ROPE_FACTORS)
    held = sum(parameter.numel() for parameter in model.parameters())
    if held != expected:
        raise CannotConvertError(f"{NOT_ALL} ({held:,} of {expected:,} values): {HUB_FORMAT}")
