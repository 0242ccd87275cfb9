"""Reads what stands beside a model's weights: config, tokenizer, generation_config."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.models import OF_A_TOKENIZER, is_local, resolve

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOAD_ERRORS = (OSError, KeyError, ImportError, RuntimeError, AttributeError, TypeError, ValueError)
"""What transformers raises for a model that it cannot load."""
BYTES_OF_PRIOR = 4
UNLIMITED = 1 << 20
"""The context window of a model that does not state one, in tokens."""


def whole_config(model: str | Path) -> Any:
    """Return the config of a model; raises ModelLoadError if there is none.

    model: as for models.resolve.
    """
    from transformers import AutoConfig

    with told_in_a_line("config of", model):
        return AutoConfig.from_pretrained(resolve(model))


def text_config(model: str | Path) -> Any:
    """Return the config of a model's text part; raises ModelLoadError if there is none."""
    return whole_config(model).get_text_config()


def context_window_in(config: Any) -> int:
    """Return the context window that a text part's config states, in tokens."""
    stated = getattr(config, "max_position_embeddings", None)
    return int(stated) if stated and stated > 0 else UNLIMITED


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Return a model's layers, KV heads and head size."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers), int(kv_heads), int(head_size)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the size of a token's chunk KV: keys and values in all layers, and its prior."""
    layers, kv_heads, head_size = kv_shape(config)
    return 2 * layers * kv_heads * head_size * dtype.itemsize + BYTES_OF_PRIOR


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """Return a model's tokenizer, without its weights.

    Args:
        name: a hub name, a folder with a model or only a tokenizer, a GGUF file, ``smollm2``.
        **options: of AutoTokenizer, such as ``trust_remote_code``.

    Raises:
        ModelLoadError: when there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    with told_in_a_line("tokenizer of", name):
        return AutoTokenizer.from_pretrained(resolve(name, files=OF_A_TOKENIZER), **options)


@contextmanager
def told_in_a_line(what: str, name: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a model that it cannot load into a ModelLoadError."""
    try:
        yield
    except LOAD_ERRORS as error:
        where = "" if is_local(name) else " from a hub, and there is no such folder: check the name"
        raise ModelLoadError(
            f"{what} {str(name)!r} could not be loaded{where}: {first_line(error)}"
        ) from error


FILE_NAME = "generation_config.json"


def generation_values(name: str | Path, *, local_only: bool = True) -> dict[str, Any] | None:
    """Return the fields in a model's generation_config.json; None if there is no such file.

    Of a file that holds no JSON object, none are returned, and a line is logged.

    Args:
        name: as for ``models.resolve``.
        local_only: for a hub's model, read only a copy on this machine.
    """
    from transformers.utils import cached_file

    try:
        path = cached_file(resolve(name), FILE_NAME, local_files_only=local_only)
        content = Path(path).read_bytes()
    except (OSError, ModelLoadError):
        return None
    reason = "it holds no JSON object"
    try:
        values = json.loads(content.decode("utf-8"))
    except ValueError as error:
        values, reason = None, first_line(error)
    if isinstance(values, dict):
        return values
    logger.warning("the model's %s is ignored: %s", FILE_NAME, reason)
    return {}


def vllm_generation_values(model_config: Any) -> dict[str, Any]:
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


def quiet_libraries() -> None:
    """Import transformers, and keep its progress bars and advice off the terminal."""
    # These import what generates, and what every model does
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
