"""Loads a model by its name, or takes a loaded one out of torch.compile, PEFT and other wrappers.

A model's layers are run one at a time, on varying numbers of rows, so compiled parts are run
uncompiled. A wrapper is tested for computing the same as the model inside; if it does, the model is
used, if not, the wrapper is run unchanged.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cacheblend_rag.blend.trial import trial_tokens
from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.engines.transformers import loading
from cacheblend_rag.engines.transformers.loading import is_quantized
from cacheblend_rag.engines.transformers.rounding_noise import model_noise, same_logits
from cacheblend_rag.errors import ConfigError, first_line

logger = logging.getLogger(__name__)

COMPILED_MODULE = "_orig_mod"
COMPILED_FUNCTION = "_torchdynamo_orig_callable"


class GivenModel(NamedTuple):
    """A model that is ready to run, with its tokenizer and name.

    wrapper: the user's module around it, if there is one. name: what it is called. loaded_by: the
    name by which it was loaded, None if it was loaded before.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    wrapper: nn.Module | None = None
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
            loaded = loading.load_model(model, loading.pick_device(device), dtype)
            return cls(loaded, tokenizer or load_tokenizer(model), str(model), loaded_by=model)
        if tokenizer is None:
            raise ConfigError("tokenizer must be given together with a loaded model")
        outer = without_compiling(model)
        inner = loading.prepare(model_in(outer))
        name = inner.config.name_or_path or inner.config.model_type
        return cls(inner, tokenizer, name, None if outer is inner else outer.eval())


def model_in(outer: nn.Module) -> PreTrainedModel:
    """Return the Hugging Face model that a module is or holds; raises ConfigError for none."""
    for module in outer.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ConfigError(
        f"model={type(outer).__name__} is not a Hugging Face model: give a causal language model "
        "(AutoModelForCausalLM loads one)"
    )


def without_compiling(given: nn.Module) -> nn.Module:
    """Return a module without `torch.compile`; a wrapper around the whole stays usable.

    Parts that were compiled in place are restored in place.
    """
    whole = _original(given)
    undone = whole is not given
    for module in list(whole.modules()):
        undone |= _put_back(module)
    if undone:
        logger.warning(
            "%s is run without torch.compile: its layers are run one at a time, on varying "
            "numbers of rows",
            type(whole).__name__,
        )
    return whole


def _original(module: Any) -> nn.Module:
    while COMPILED_MODULE in getattr(module, "_modules", {}):
        module = module._modules[COMPILED_MODULE]
    found: nn.Module = module
    return found


def _put_back(module: nn.Module) -> bool:
    """Undo in-place compilation of a module; returns whether there was any."""
    undone = False
    for name, child in list(module._modules.items()):
        if child is not None and (original := _original(child)) is not child:
            module._modules[name], undone = original, True
    if module.__dict__.get("_compiled_call_impl") is not None:
        module._compiled_call_impl, undone = None, True
    forward = module.__dict__.get("forward")
    if (plain := getattr(forward, COMPILED_FUNCTION, None)) is not None:
        del module.forward
        if getattr(plain, "__func__", None) is not type(module).forward:
            module.forward = plain
        undone = True
    return undone


@torch.no_grad()
def changes_result(outer: nn.Module, inner: PreTrainedModel) -> bool:
    """Whether a wrapper computes something else than the model in it.

    Raises ConfigError when it cannot be run as the model is.
    """
    ids = trial_tokens(int(inner.config.get_text_config().vocab_size), inner.device)[None]

    def logits(model: nn.Module) -> Tensor:
        return cast(Tensor, model(input_ids=ids, use_cache=False).logits[0].float())

    wanted = logits(inner)
    try:
        found = logits(outer)
    except Exception as error:
        raise ConfigError(
            f"model={type(outer).__name__} cannot be run as the {type(inner).__name__} in it: "
            f"{first_line(error)}"
        ) from error
    if found.shape != wanted.shape:
        return True
    noise = model_noise(inner, lambda: logits(inner))
    return not same_logits(found, wanted, noise, quantized=is_quantized(inner))
