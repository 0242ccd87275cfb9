"""Reads the generation settings of the model in a vLLM."""

from __future__ import annotations

import logging
from typing import Any

from cacheblend_rag.errors import first_line

logger = logging.getLogger(__name__)


def generation_values(model_config: Any) -> dict[str, Any]:
    """Return the fields of the GenerationConfig in effect for a vLLM's ``ModelConfig``.

    They are the model's own, or those of ``--generation-config`` (none for ``vllm``), overridden by
    ``--override-generation-config``. vLLM has no ``do_sample``, so an overridden temperature
    means sampling.
    """
    named: dict[str, Any] = {}
    if model_config.generation_config != "vllm":
        try:
            named = dict(model_config.try_get_generation_config())
        except (OSError, TypeError, ValueError, AttributeError) as error:
            logger.warning("the model's generation_config is ignored: %s", first_line(error))
    overrides = dict(model_config.override_generation_config or {})
    if "temperature" in overrides:
        overrides.setdefault("do_sample", overrides["temperature"] != 0)
    return {**named, **overrides}
