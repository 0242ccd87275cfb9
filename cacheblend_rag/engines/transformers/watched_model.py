"""A model that is tested when it is loaded, and refused once its weights or adapters change.

PEFT is not imported. A layer with PEFT's adapters (LoRA and the like) is recognized by its
attributes: it names its containers of adapters (``adapter_layer_names``), which adapters are
active, which are merged into its weights, and whether all are disabled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cacheblend_rag.blend.attention import without_cudnn
from cacheblend_rag.blend.trial import key_traits, trial_tokens
from cacheblend_rag.engines.identity import model_identity, weights_hash, weights_in_files
from cacheblend_rag.engines.transformers.loop import ModelLoop
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.trial import find_ordinary_prefill, open_stack
from cacheblend_rag.errors import ConfigError, ModelLoadError, UnsupportedModelError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.models import resolve
from cacheblend_rag.prefill.policy import Controller, Rates
from cacheblend_rag.reason import Reason

logger = logging.getLogger(__name__)

PLAIN = (bool, int, float, str)


@dataclass(frozen=True, eq=False)
class TriedModel:
    """The result of testing a model.

    identity: everything that its KV depends on. ordinary: runs it without blending. stack: runs it
    layer by layer, controller: decides what to load; both None if it cannot be blended. refusal:
    why not, or None.
    """

    identity: dict[str, Any]
    ordinary: OrdinaryPrefill
    stack: TransformersStack | None
    controller: Controller | None
    refusal: Reason | None


class WatchedModel:
    """A model that was tested, and is watched from then on.

    tried: the result of the test.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loop: ModelLoop,
        store: TieredKVStore,
        *,
        name: str | Path | None = None,
    ) -> None:
        """Test the model.

        loop: runs the model. store: where its KV is kept. name: by which it was loaded, if it
        was. Raises ConfigError when it cannot be run.
        """
        self._model, self._loop = model, loop
        weights = _hash_in_files(name, model.dtype)
        self.tried = loop.call(lambda: _try(model, store, weights))
        self._state = loop.call(lambda: ModelState.of(model))

    @property
    def is_current(self) -> bool:
        """Whether weights and active adapters are those that were tested."""
        # While a layer is run its weights may be replaced for a moment: look again between steps.
        return self._is_same() or self._loop.call(self._is_same)

    def check(self) -> None:
        """Raise ConfigError when the model is not as it was tested."""
        if not self.is_current:
            raise ConfigError(
                "the model's weights or active adapters have changed: activate those that it had, "
                "or open another engine with it"
            )

    def _is_same(self) -> bool:
        return ModelState.of(self._model).equals(self._state)


@torch.no_grad()
def _try(model: PreTrainedModel, store: TieredKVStore, weights: str | None) -> TriedModel:
    """Find out how a model is run, and whether it can be blended.

    weights: their hash, if it is known.
    """
    identity = partial(
        model_identity,
        weights or hash_in_memory(model, model.dtype),
        model.config,
        model.dtype,
        precision=store.precision,
    )
    with without_cudnn():
        try:
            stack = open_stack(model)
            ordinary = find_ordinary_prefill(model, stack)
        except UnsupportedModelError as error:
            logger.warning("blending is off for this model: %s", error)
            ordinary = find_ordinary_prefill(model, None)
            return TriedModel(identity(keys=()), ordinary, None, None, error.reason)
        vocabulary = int(model.config.get_text_config().vocab_size)
        keys = key_traits(stack, trial_tokens(vocabulary, stack.geometry.device))
        controller = Controller(stack.costs, Rates(), store.speeds)
        return TriedModel(identity(keys=keys), ordinary, stack, controller, None)


def _hash_in_files(name: str | Path | None, dtype: torch.dtype) -> str | None:
    """Return the hash of weights that were loaded by name; other engines have the same.

    None for weights that are in no such files.
    """
    if name is None:
        return None
    try:
        return weights_in_files(resolve(name), dtype)
    except ModelLoadError as reason:
        logger.debug("weights are told apart in memory: %s", reason)
        return None


# What a model computes with


@dataclass(frozen=True, eq=False)
class ModelState:
    """What shows that a model's weights or adapters have changed.

    tensors: its weights. stamps: its modules, each weight's version counter and address, and the
    adapters of each layer: those merged into it, and the active ones with their settings.
    """

    tensors: tuple[ReferenceType[Tensor], ...]
    stamps: tuple[Hashable, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Look at a model: about a microsecond for each module and weight."""
        modules = list(model.modules())
        tensors = [
            weight
            for module in modules
            for name, weight in (*module._parameters.items(), *module._buffers.items())
            if weight is not None and name not in module._non_persistent_buffers_set
        ]
        adapted: list[Any] = [one for one in modules if _has_adapters(one)]
        merged = [tuple(layer.merged_adapters) for layer in adapted]
        active = [
            tuple((name, *_settings(layer, name).items()) for name in _active(layer))
            for layer in adapted
        ]
        stamps = (*map(id, modules), *map(_stamp, tensors), *merged, *active)
        return cls(tuple(map(ref, tensors)), stamps)

    def equals(self, other: ModelState) -> bool:
        """Whether modules, weights and active adapters are those of another state."""
        return self.stamps == other.stamps and all(map(is_, self.tensors, other.tensors))


def _stamp(tensor: Tensor) -> Hashable:
    """Return a tensor's address and version: one of them changes when it is moved or written."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # an inference tensor counts no writes, a wrapper has no storage
        return None


def hash_in_memory(model: nn.Module, dtype: torch.dtype) -> str:
    """Return a hash of a model's weights, those of its adapters included, and of what is active.

    Without adapters it is that of the model's own files. dtype: that of the values.
    """
    weights = model.state_dict(keep_vars=True).items()
    distinct = {id(weight): (name, weight) for name, weight in reversed(weights)}
    hashed = weights_hash(distinct.values(), dtype)
    active = {
        name: [(adapter, _settings(layer, adapter)) for adapter in _active(layer)]
        for name, layer in model.named_modules()
        if _has_adapters(layer)
    }
    return f"{hashed} {json.dumps(active, sort_keys=True)}" if active else hashed


def _has_adapters(module: nn.Module) -> bool:
    return getattr(module, "adapter_layer_names", None) is not None


def _active(layer: Any) -> tuple[str, ...]:
    """Return the adapters that a layer applies, in order; merged ones are applied by its weights.

    A layer whose adapters are disabled takes merged ones out of its weights when it is next run.
    """
    if layer.disable_adapters:
        return ()
    active = layer.active_adapters
    names = layer.merged_adapters or ([active] if isinstance(active, str) else active)
    return tuple(dict.fromkeys(names))


def _settings(layer: nn.Module, adapter: str) -> dict[str, bool | int | float | str]:
    """Return a layer's settings of an adapter, such as its scaling, by name."""
    return {
        name: value[adapter] if isinstance(value[adapter], PLAIN) else type(value[adapter]).__name__
        for name, value in vars(layer).items()
        if type(value) is dict and adapter in value
    }
