"""The generation settings of the model that a vLLM runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cacheblend_rag.errors import first_line

logger = logging.getLogger(__name__)


def generation_values(model_config: Any) -> dict[str, Any]:
    """Return the fields of a GenerationConfig that a vLLM's ``ModelConfig`` stands for.

    They are the model's own, or those of ``--generation-config`` (none for ``vllm``), with
    ``--override-generation-config`` laid over them. vLLM has no ``do_sample``, so a temperature
    that is overridden is one to sample with.
    """
    overrides = dict(model_config.override_generation_config or {})
    if "temperature" in overrides:
        overrides.setdefault("do_sample", overrides["temperature"] != 0)
    return {**_named(model_config), **overrides}


def _named(model_config: Any) -> Mapping[str, Any]:
    if model_config.generation_config == "vllm":
        return {}
    try:
        return dict(model_config.try_get_generation_config())
    except (OSError, TypeError, ValueError, AttributeError) as error:
        logger.warning("the model's generation_config is ignored: %s", first_line(error))
        return {}
