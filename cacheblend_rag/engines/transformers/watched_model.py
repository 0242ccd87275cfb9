"""A model that is tested when it is loaded, and again whenever it changes."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend_rag.blend.attention import without_cudnn
from cacheblend_rag.blend.trial import key_traits, trial_tokens
from cacheblend_rag.engines.identity import model_identity, weights_in_files
from cacheblend_rag.engines.transformers.loading import prepare
from cacheblend_rag.engines.transformers.loop import ModelLoop
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.trial import find_ordinary_prefill, open_stack
from cacheblend_rag.engines.transformers.weights import ModelState, hash_in_memory
from cacheblend_rag.errors import ModelLoadError, UnsupportedModelError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.models import resolve
from cacheblend_rag.prefill.controller import Controller, Rates
from cacheblend_rag.reason import Reason

logger = logging.getLogger(__name__)

KEPT_TRIALS = 32
"""How many combinations of adapters have their test results kept."""


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
        loop: ModelLoop,
        store: TieredKVStore,
        *,
        name: str | Path | None = None,
    ) -> None:
        """Test the model.

        loop: runs the model. store: where its KV is kept. name: by which it was loaded, if it
        was. Raises ConfigError when it cannot be run.
        """
        self.model = model
        self._loop, self._rates = loop, Rates()
        self._precision, self._speeds = store.precision, store.speeds
        self._trials: dict[Hashable, TriedModel] = {}
        loop.call(
            lambda: self._use(ModelState.of(model), self._try(_hash_in_files(name, model.dtype)))
        )

    def tried(self) -> TriedModel:
        """Return the test result for the model's current state; tests it again if it changed.

        Raises ConfigError when it can no longer be run.
        """
        if not self._is_current(ModelState.of(self.model)):
            # While a layer is run its weights may be loaded for a moment: look between steps.
            self._loop.call(self._look_again)
        return self._tried

    def _is_current(self, now: ModelState) -> bool:
        return now.adapters == self._state.adapters and now.has_weights_of(self._state)

    def _look_again(self) -> None:
        now = ModelState.of(self.model)
        if self._is_current(now):
            return
        if now.has_weights_of(self._state):
            logger.info("the active adapters have changed: their KV is stored separately")
        else:
            logger.warning("the model's weights have changed: its KV is now stored separately")
            self._trials.clear()
        prepare(self.model)
        now = ModelState.of(self.model)
        known = self._trials.pop(now.adapters) if now.adapters in self._trials else self._try()
        self._use(now, known)

    def _use(self, state: ModelState, tried: TriedModel) -> None:
        self._state, self._tried = state, tried
        self._trials[state.adapters] = tried
        if len(self._trials) > KEPT_TRIALS:
            del self._trials[next(iter(self._trials))]

    @torch.no_grad()
    def _try(self, weights: str | None = None) -> TriedModel:
        """Find out how the model is run, and whether it can be blended.

        weights: their hash, if it is known.
        """
        weights = weights or hash_in_memory(self.model, self.model.dtype)
        with without_cudnn():
            try:
                stack = open_stack(self.model)
                ordinary = find_ordinary_prefill(self.model, stack)
            except UnsupportedModelError as error:
                logger.warning("blending is off for this model: %s", error)
                ordinary = find_ordinary_prefill(self.model, None)
                return TriedModel(self._identity(weights), ordinary, None, None, error.reason)
            vocabulary = int(self.model.config.get_text_config().vocab_size)
            keys = key_traits(stack, trial_tokens(vocabulary, stack.geometry.device))
            controller = Controller(stack.costs, self._rates, self._speeds)
            return TriedModel(self._identity(weights, keys), ordinary, stack, controller, None)

    def _identity(self, weights: str, keys: Sequence[int] = ()) -> dict[str, Any]:
        """Return everything that KV of the model depends on."""
        model, precision = self.model, self._precision
        return model_identity(weights, model.config, model.dtype, keys=keys, precision=precision)


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
