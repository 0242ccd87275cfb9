"""Loads a model by its name, or takes a loaded one out of torch.compile and PEFT.

A model's layers are run one at a time, on varying numbers of rows, so compiled parts are run
uncompiled.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from cacheblend_rag.engines.model_files import (
    generation_values,
    load_tokenizer,
    told_in_a_line,
)
from cacheblend_rag.errors import ConfigError, first_line
from cacheblend_rag.models import resolve

logger = logging.getLogger(__name__)

COMPILED_MODULE = "_orig_mod"
COMPILED_FUNCTION = "_torchdynamo_orig_callable"


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


def default_dtype(config: Any, device: torch.device) -> torch.dtype | None:
    """Return the dtype of a config's weights, on a CPU float32 if it is slower or may overflow.

    Only CPUs with AMX multiply bfloat16 as fast as float32. What layers compute may be above
    float16's 65,504. None where the config states no dtype: its weights' own.
    """
    stated = stated_dtype(config)
    if device.type != "cpu" or stated == torch.float32:
        return stated
    has: Any = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.6 does not tell
    if stated == torch.bfloat16 and has.get("amx_bf16"):
        return stated
    why = "float16 may overflow" if stated == torch.float16 else "it has no AMX for bfloat16"
    logger.info("the model of %s runs in float32 on this CPU: %s", stated, why)
    return torch.float32


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
    precision = named_dtype(dtype) if isinstance(dtype, str) else dtype
    source, values = resolve(name), generation_values(name, local_only=False)
    with told_in_a_line("model", name):
        config = AutoConfig.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=precision or default_dtype(config, device) or "auto",
            use_safetensors=True,
            generation_config=None if values is None else GenerationConfig(),
        )
    prepared = prepare(model.to(device))
    # Unchecked: transformers refuses the whole file for one value, which answers may not need.
    vars(prepared.generation_config).update(values or {})
    return prepared


def stated_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype that a config states for a model's weights, None if it states none."""
    stated = config.dtype or config.get_text_config().dtype
    return getattr(torch, stated, None) if isinstance(stated, str) else stated


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Put a model into the state the engine serves it in.

    Raises ConfigError when it does not continue texts, or is not whole in memory. Models that cap
    attention logits are run with eager attention: PyTorch's fused attention has no such cap and
    would silently leave it out.
    """
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ConfigError(
            f"model={type(model).__name__} does not continue texts: give a causal language model "
            "(AutoModelForCausalLM loads one)"
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise ConfigError(
            f"model={type(model).__name__} has weights that are not in memory (device_map, "
            "cpu_offload): load all of it"
        )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether the model's weights are in fewer bits than it computes in."""
    return getattr(model.config, "quantization_config", None) is not None


class GivenModel(NamedTuple):
    """A model that is ready to run, with its tokenizer and name.

    name: what it is called. loaded_by: the name by which it was loaded, None if it was loaded
    before.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    loaded_by: str | Path | None = None

    @classmethod
    def of(
        cls,
        model: str | Path | nn.Module,
        tokenizer: Any,
        device: str | None,
        dtype: str | torch.dtype | None,
    ) -> Self:
        """Load a model by its name, or prepare a loaded one; see TransformersEngine."""
        if not isinstance(model, nn.Module):
            loaded = load_model(model, pick_device(device), dtype)
            return cls(loaded, tokenizer or load_tokenizer(model), str(model), loaded_by=model)
        if tokenizer is None:
            raise ConfigError("tokenizer must be given together with a loaded model")
        inner = prepare(_without_peft(without_compiling(model)))
        return cls(inner, tokenizer, inner.config.name_or_path or inner.config.model_type)


def _without_peft(outer: Any) -> PreTrainedModel:
    """Return the Hugging Face model that PEFT put adapters into; raises ConfigError for none.

    PEFT is not imported: its models are recognized by ``get_base_model``.
    """
    kind, inner = type(outer).__name__, outer
    if hasattr(outer, "get_base_model"):
        tuned = getattr(outer, "active_peft_config", None)
        if getattr(tuned, "is_prompt_learning", False):
            raise ConfigError(
                f"model={kind} computes something else than the model in it "
                f"({type(tuned).__name__}): give a model, or one with adapters"
            )
        inner = outer.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(
            f"model={kind} is not a Hugging Face model: give a causal language model "
            "(AutoModelForCausalLM loads one)"
        )
    return inner


def without_compiling(given: nn.Module) -> nn.Module:
    """Return a module without `torch.compile`; parts that were compiled in place are restored."""
    whole: nn.Module = _original(given)
    restored = [_restore(module) for module in list(whole.modules())]
    if whole is not given or any(restored):
        logger.warning(
            "%s is run without torch.compile: its layers are run one at a time, on varying "
            "numbers of rows",
            type(whole).__name__,
        )
    return whole


def _original(module: Any) -> Any:
    while COMPILED_MODULE in getattr(module, "_modules", {}):
        module = module._modules[COMPILED_MODULE]
    return module


def _restore(module: nn.Module) -> bool:
    """Undo in-place compilation of a module; returns whether there was any."""
    own, is_changed = vars(module), False
    for name, child in list(module._modules.items()):
        if (original := _original(child)) is not child:
            module._modules[name], is_changed = original, True
    if own.get("_compiled_call_impl") is not None:
        module._compiled_call_impl, is_changed = None, True
    if (plain := getattr(own.get("forward"), COMPILED_FUNCTION, None)) is not None:
        del module.forward
        if getattr(plain, "__func__", None) is not type(module).forward:
            module.forward = plain
        is_changed = True
    return is_changed
