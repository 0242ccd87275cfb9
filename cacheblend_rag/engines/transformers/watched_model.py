"""A model that is tested when it is loaded, and again whenever it changes."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cacheblend_rag.blend.attention import without_cudnn
from cacheblend_rag.blend.trial import key_traits, trial_tokens
from cacheblend_rag.engines.identity import model_identity
from cacheblend_rag.engines.transformers import loading
from cacheblend_rag.engines.transformers.adapters import (
    adapters_hash,
    has_adapters,
    in_effect,
    main_settings,
    merged_into,
)
from cacheblend_rag.engines.transformers.compatibility import open_stack
from cacheblend_rag.engines.transformers.loading import changes_result
from cacheblend_rag.engines.transformers.model_steps import PriorityLock
from cacheblend_rag.engines.transformers.ordinary_prefill import (
    OrdinaryPrefill,
    find_ordinary_prefill,
)
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.controller import Controller, Rates
from cacheblend_rag.reason import Reason, ReasonCode

logger = logging.getLogger(__name__)

KEPT_TRIALS = 32
"""How many combinations of adapters have their test results cached."""


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
    """A model, with the test result for its current state.

    Engines that share the model's store share this.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lock: PriorityLock,
        store: TieredKVStore,
        *,
        name: str | Path | None = None,
        wrapper: nn.Module | None = None,
    ) -> None:
        """Test the model.

        lock: the model's lock. store: where its KV is kept. name: by which it was loaded, if it
        was. wrapper: the user's module around it, if there is one.
        Raises ConfigError when it cannot be run.
        """
        self.model = model
        self._priority_lock, self._wrapper = lock, wrapper
        self._precision, self._speeds, self._rates = store.precision, store.speeds, Rates()
        with lock.taken():
            self._state = ModelState.of(model)
            self._begin(name)

    def tried(self) -> TriedModel:
        """Return the test result for the model's current state; tests it again if it changed.

        Raises ConfigError when it can no longer be run.
        """
        now = ModelState.of(self.model)
        if now.has_weights_of(self._state) and now.adapters == self._state.adapters:
            return self._tried
        # While a layer is run its weights may be loaded for a moment, so look again in a turn.
        with self._priority_lock.taken():
            return self._look_again(ModelState.of(self.model))

    def _look_again(self, now: ModelState) -> TriedModel:
        if not now.has_weights_of(self._state):
            loading.prepare(self.model)
            self._state = ModelState.of(self.model)
            self._begin(None)
            logger.warning("the model's weights have changed: its KV is now stored separately")
        elif now.adapters != self._state.adapters:
            loading.prepare(self.model)
            self._state = now
            known = self._trials.pop(now.adapters, None)
            self._tried = self._try() if known is None else known
            self._remember()
            logger.info("the active adapters have changed: their KV is stored separately")
        return self._tried

    def _begin(self, name: str | Path | None) -> None:
        """Forget all test results, since the weights have changed, and test the model."""
        self._weights = loading.weights_identity(self.model, name)
        self._trials: dict[Hashable, TriedModel] = {}
        self._tried = self._try()
        self._remember()

    def _remember(self) -> None:
        self._trials[self._state.adapters] = self._tried
        while len(self._trials) > KEPT_TRIALS:
            del self._trials[next(iter(self._trials))]

    def _try(self) -> TriedModel:
        """Find out how the model is run, and whether it can be blended."""
        runs = self.model
        with torch.no_grad(), without_cudnn():
            try:
                if self._wrapper is not None and changes_result(self._wrapper, self.model):
                    runs = cast(PreTrainedModel, self._wrapper)
                    raise UnsupportedModelError(
                        f"its wrapper ({type(runs).__name__}) computes something else than the "
                        f"{type(self.model).__name__} in it",
                        ReasonCode.UNSUPPORTED_MODEL,
                    )
                stack = open_stack(self.model)
                controller = Controller(stack.costs, self._rates, self._speeds)
                ordinary = find_ordinary_prefill(self.model, stack)
                return TriedModel(self._identity(stack), ordinary, stack, controller, None)
            except UnsupportedModelError as error:
                logger.warning("blending is off for this model: %s", error)
                ordinary = find_ordinary_prefill(runs, None)
                return TriedModel(self._identity(None), ordinary, None, None, error.reason)

    def _identity(self, stack: TransformersStack | None) -> dict[str, Any]:
        """Return everything that KV of the model depends on."""
        keys: list[int] = []
        if stack is not None:
            vocabulary = int(self.model.config.get_text_config().vocab_size)
            keys = key_traits(stack, trial_tokens(vocabulary, stack.geometry.device))
        return model_identity(
            self._weights,
            self.model.config,
            self.model.dtype,
            keys=keys,
            precision=self._precision,
            adapters=adapters_hash(self.model, self.model.dtype),
        )


@dataclass(frozen=True, eq=False)
class ModelState:
    """A snapshot of a model.

    tensors: its weights. stamps: its modules, each weight's version counter and storage, and
    the adapters merged into each layer. adapters: the active ones, with their settings, by layer.
    """

    tensors: tuple[ReferenceType[Tensor], ...]
    stamps: tuple[Hashable, ...]
    adapters: tuple[Hashable, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Look at a model: about half a microsecond for each module and weight."""
        modules, tensors = _parts(model)
        stamps: list[Hashable] = [len(modules), *map(id, modules), *_stamps(tensors)]
        adapters: list[Hashable] = []
        # Modules are many, their classes few.
        adapted = {kind for kind in set(map(type, modules)) if has_adapters(kind)}
        for layer in [module for module in modules if type(module) in adapted] if adapted else ():
            stamps.append(merged_into(layer))
            adapters.append(tuple(main_settings(layer, name) for name in in_effect(layer)))
        return cls(tuple(map(ref, tensors)), tuple(stamps), tuple(adapters))

    def has_weights_of(self, other: ModelState) -> bool:
        """Whether modules and weights are those of another state; adapters in effect may differ."""
        return self.stamps == other.stamps and all(map(is_, self.tensors, other.tensors))


def _parts(model: nn.Module) -> tuple[list[nn.Module], list[Tensor]]:
    """Return a model's modules, and their parameters and persistent buffers."""
    modules = [model]
    found: list[Tensor | None] = []
    for module in modules:  # which grows meanwhile
        if children := module._modules:
            modules += [child for child in children.values() if child is not None]
        if parameters := module._parameters:
            found += parameters.values()
        if buffers := module._buffers:
            transient = module._non_persistent_buffers_set
            found += [buffer for name, buffer in buffers.items() if name not in transient]
    return modules, [tensor for tensor in found if tensor is not None]


def _stamps(tensors: list[Tensor]) -> list[Hashable]:
    try:
        return [*[tensor._version for tensor in tensors], *[one.data_ptr() for one in tensors]]
    except RuntimeError:  # one has no such number
        return [*map(_stamp, tensors)]


def _stamp(tensor: Tensor) -> Hashable:
    """Return what changes when a tensor is written to, or is laid elsewhere."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # an inference tensor counts no writes, a wrapper has no storage
        return None
