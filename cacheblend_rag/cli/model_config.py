"""What a model's config tells of it without its weights."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.cli.models import DEMO_MODEL
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.errors import ModelLoadError


def text_config(model: str) -> Any:
    """Return the config of a model's text part; raises ModelLoadError when there is none.

    model: ``demo``, a folder or a hub name.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(MODEL_FOLDER if model == DEMO_MODEL else model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"model={model!r}: its config cannot be read: {error}") from error
    return config.get_text_config()
