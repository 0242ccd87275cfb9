"""Reads a model's config, tokenizer and generation_config; explains why it cannot be blended."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import CacheBlendError, ModelLoadError, UnsupportedModelError, first_line
from cacheblend_rag.models import OF_A_TOKENIZER, is_local, resolve
from cacheblend_rag.reason import Reason, ReasonCode

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

LOAD_ERRORS = (OSError, KeyError, ImportError, RuntimeError, AttributeError, TypeError, ValueError)
"""What transformers raises for a model that it cannot load."""
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


# Why a model cannot be blended. A test of the model decides whether it can be, and its finding is
# part of every reason. The config only adds an explanation: rotary settings explain keys that
# cannot be moved, and nothing else.

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ATTENTION_TYPES = ("full_attention", "sliding_attention", "attention")
KEYS_CANNOT_BE_MOVED = "rotary embedding cannot be undone"
"""Refusal by the load-time test that unusual RoPE settings in the config may explain."""


def known_obstacle(whole: Any) -> Reason | None:
    """Return a property in a Hugging Face config that is known to prevent blending, or None."""
    config = whole.get_text_config()
    nested = getattr(config, "attn_config", None)
    alibi = any(getattr(part, "alibi", 0) for part in (config, nested))
    # Some families name here what may see later tokens: "vision" says nothing about text.
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    alibi = alibi or config.model_type == "bloom"
    latent = getattr(config, "kv_lora_rank", None)
    shared = getattr(config, "num_kv_shared_layers", 0)
    inputs = getattr(config, "hidden_size_per_layer_input", 0)
    for present, code, name in (
        (whole.is_encoder_decoder, ReasonCode.UNSUPPORTED_MODEL, "encoder-decoders"),
        (latent, ReasonCode.UNSUPPORTED_ATTENTION, "multi-head latent attention (MLA)"),
        (alibi, ReasonCode.UNSUPPORTED_POSITIONS, "ALiBi positions"),
        (shared, ReasonCode.UNSUPPORTED_ATTENTION, "layers that share KV"),
        (both_ways, ReasonCode.UNSUPPORTED_ATTENTION, "bidirectional attention"),
        (inputs, ReasonCode.UNSUPPORTED_LAYERS, "per-layer inputs"),
    ):
        if present:
            return Reason(code, f"{name} cannot be blended")
    return _other_layers(config)


def _other_layers(config: Any) -> Reason | None:
    """Return the types of layers that are no attention, in the order of the layers."""
    types = dict.fromkeys(getattr(config, "layer_types", None) or ())
    others = [kind for kind in types if kind not in ATTENTION_TYPES]
    if not others:
        return None
    told = f"layers of type {' and '.join(others)} cannot be blended"
    return Reason(ReasonCode.UNSUPPORTED_LAYERS, told)


def known_rotary(whole: Any) -> Reason | None:
    """Return a config's rotary type if it is known to change with the prompt, or None."""
    for rope in _rope_parameters(whole.get_text_config()):
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            told = f"rotary positions of type {kind} cannot be re-rotated"
            return Reason(ReasonCode.UNSUPPORTED_POSITIONS, told)
    return None


def explained(config: Any, error: Exception, otherwise: Reason | None = None) -> Reason:
    """Return why a model failed its test: the finding, and an explanation from its config.

    otherwise: an explanation to use if the config has none.
    """
    known = known_rotary(config) if KEYS_CANNOT_BE_MOVED in str(error) else known_obstacle(config)
    known = known or otherwise
    if not isinstance(error, CacheBlendError):
        seen = f"its layers cannot be run one by one ({type(error).__name__}: {error})"
        return known or Reason(ReasonCode.UNSUPPORTED_LAYERS, seen)
    if known is not None:
        return known if known == str(error) else Reason(known.code, f"{known}: {error}")
    if isinstance(error, UnsupportedModelError):
        return error.reason
    return Reason(ReasonCode.UNSUPPORTED_MODEL, str(error))


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found or "rope_theta" in found:
        return [found]
    return [value for value in found.values() if isinstance(value, dict)]
