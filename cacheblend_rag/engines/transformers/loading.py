"""Loads a model from a hub name or a local folder, with one-line errors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag.engines.generation_file import REFUSED, repaired_generation_config
from cacheblend_rag.engines.identity import weights_in_files
from cacheblend_rag.engines.tokenizer import unloaded
from cacheblend_rag.engines.transformers.adapters import base_weights_hash
from cacheblend_rag.errors import ConfigError, ModelLoadError, first_line
from cacheblend_rag.models import resolve

logger = logging.getLogger(__name__)


def pick_device(device: str | None) -> torch.device:
    """Return the given device, else the first available one of CUDA, MPS and CPU."""
    if device is not None:
        try:
            return torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"device={device!r} is not available here: {first_line(error)}"
            ) from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """Return the given dtype; by default float32 on a CPU and the checkpoint's own elsewhere."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    return named_dtype(dtype)


def named_dtype(name: str) -> torch.dtype:
    """Return the floating-point dtype called ``name``; raises ConfigError for others."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype={name!r} must be float32, bfloat16 or float16")
    return found


def load_model(
    name: str | Path, device: torch.device, dtype: str | torch.dtype | None
) -> PreTrainedModel:
    """Load a causal language model from safetensors weights.

    Raises ModelLoadError when there is no such model or it cannot be loaded, ConfigError for an
    unknown ``dtype``.
    """
    precision = pick_dtype(dtype, device)
    source = resolve(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=precision,
            use_safetensors=True,
            generation_config=repaired_generation_config(name),
        )
    except (OSError, KeyError, ImportError, RuntimeError, *REFUSED) as error:
        raise ModelLoadError(f"{unloaded('model', name)}: {first_line(error)}") from error
    return prepare(model.to(device))


def checkpoint_dtype(name: str | Path) -> torch.dtype | None:
    """Return the dtype that a model's config states for its weights, None if it states none.

    Raises ModelLoadError when the config cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(resolve(name))
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{unloaded('config', name)}: {first_line(error)}") from error
    stated = config.dtype or config.get_text_config().dtype
    return getattr(torch, stated, None) if isinstance(stated, str) else stated


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Put a model into the state the engine serves it in.

    Raises ConfigError when it does not continue texts. Models that cap attention logits are run
    with eager attention: PyTorch's fused attention has no such cap and would silently leave it out.
    """
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ConfigError(
            f"model={type(model).__name__} does not continue texts: give a causal language model "
            "(AutoModelForCausalLM loads one)"
        )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def weights_identity(model: PreTrainedModel, name: str | Path | None) -> str:
    """Return a hash of a model's weights without its adapters.

    It is taken from its files where it was loaded by name, so that it is what other engines say of
    them, else from memory.
    """
    if name is not None:
        try:
            return weights_in_files(resolve(name), model.dtype)
        except ModelLoadError as reason:
            logger.debug("weights are told apart in memory: %s", reason)
    return base_weights_hash(model, model.dtype)


def vocabulary_size(model: PreTrainedModel, tokenizer: Any) -> int:
    """Return how many tokens a model's logits, or its tokenizer, tell apart; the larger one."""
    return max(int(model.config.get_text_config().vocab_size), len(tokenizer))


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether the model's weights are in fewer bits than it computes in."""
    return getattr(model.config, "quantization_config", None) is not None
