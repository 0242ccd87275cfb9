"""Checks of user input that run before anything is loaded or computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import ConfigError, MissingExtraError, ModelLoadError
from cacheblend_rag.models import check, is_local
from cacheblend_rag.rag import BUNDLED
from cacheblend_rag.settings import EMBEDDED, VLLM
from cacheblend_rag.settings.options import check_server_url

if TYPE_CHECKING:
    from cacheblend_rag.settings import BlendConfig, EngineConfig

CONFIG = "config.json"
HUB_SECONDS = 10.0
DTYPES = ("float32", "bfloat16", "float16")
RETRIEVAL_MODULES = ("sentence_transformers",)
INDEX_MODULES = (*RETRIEVAL_MODULES, "llama_index", "bs4", "pypdf")


def check_model(name: str) -> None:
    """Raise ModelLoadError unless the model's config can be found.

    name: as for models.resolve; the hub is asked for a model that is not on this machine.
    """
    check(name)
    if is_local(name):
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, CONFIG), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=HUB_SECONDS)
    except Exception as error:  # the hub client and its HTTP library raise many types
        raise ModelLoadError(
            f"model={name!r} is not a folder here, and the hub returned no model of that name "
            f"({type(error).__name__}): check the name, the network and HF_TOKEN"
        ) from error


def check_chunk_size(name: str, chunk_size: int, model: str, window: int | None = None) -> None:
    """Raise ConfigError when a chunk of so many tokens fits no prompt of the model.

    name: of the setting. window: the model's context window, by default what its config says.
    """
    quiet_libraries()
    from cacheblend_rag.engines.model_files import text_config

    window = window or getattr(text_config(model), "max_position_embeddings", None)
    if window and chunk_size >= window:
        raise ConfigError(
            f"{name}={chunk_size}: prompts of model {model!r} hold {window:,} "
            "tokens, the question and the answer among them: give a smaller one"
        )


def check_embedding_model(name: str) -> None:
    """Raise ModelLoadError when an embedding model's folder does not exist."""
    if name != BUNDLED and is_local(name) and not Path(name).is_dir():
        raise ModelLoadError(f"embedding_model={name!r}: there is no such folder")


def check_installed(modules: Iterable[str], feature: str, extra: str) -> None:
    """Raise MissingExtraError, without importing anything, unless all modules are installed."""
    if any(find_spec(module) is None for module in modules):
        raise MissingExtraError(feature, extra)


def check_config(config: EngineConfig) -> None:
    """Raise what is wrong with an engine's settings, as far as nothing must be loaded for it."""
    check_engine(config.engine)
    if config.model:
        check_model(config.model)
    check_placement(config.device, config.dtype)
    check_selector(config.blend.selector, config.blend.selector_options)


def check_engine(engine: str) -> None:
    """Raise ConfigError unless it is an engine or a URL, MissingExtraError without vLLM."""
    if engine == VLLM:
        check_installed(("vllm",), "engine='vllm'", "vllm")
    elif "://" in engine:
        check_server_url(engine)
    elif engine != EMBEDDED:
        raise ConfigError(
            f"engine={engine!r} must be {EMBEDDED}, {VLLM} or a server's URL, like "
            "http://127.0.0.1:8000"
        )


def check_placement(device: str | None, dtype: str | None = None) -> None:
    """Raise ConfigError when a device is not available, or a dtype is unknown."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if device is not None:
        quiet_libraries()
        from cacheblend_rag.engines.transformers.loading import pick_device

        pick_device(device)


def check_selector(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for an unknown selector or an invalid option of it."""
    from cacheblend_rag.blend.selectors import make_selector

    make_selector(name, options)


def check_check_layers(config: BlendConfig, model: str) -> None:
    """Raise ConfigError when a check layer is not below the model's layers."""
    quiet_libraries()
    from cacheblend_rag.blend import plan_schedule
    from cacheblend_rag.engines.model_files import text_config

    plan_schedule(config.with_selector("hkvd"), text_config(model).num_hidden_layers)
