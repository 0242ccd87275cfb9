"""Opens an engine from its settings, with its store and registry."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.settings import AUTO, EMBEDDED, VLLM
from cacheblend_rag.settings.base import Secret

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import BlendConfig, EngineConfig
    from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)


def open_engine(
    engine: str | EngineConfig = AUTO, *, config: BlendConfig | None = None, **options: Any
) -> Engine:
    """Return an engine.

    Args:
        engine: all settings at once, or the kind of engine: ``transformers`` (embedded), ``vllm``
            (in this process), the URL of a server that ``cacheblend-rag serve`` started, or
            ``auto``: vLLM if it is installed and there is a CUDA device, else the embedded one; the
            choice and its reason are logged.
        config: the default for requests without one (``blend`` in EngineConfig).
        options: the other fields of EngineConfig (``model``, ``instruction``, ``namespace``,
            ``profile``, ``lead_in``, ``fill_on_miss``, ``guard``, ``device``, ...), and those of
            StoreConfig (``kv_path``, ...).

    Raises:
        ConfigError: for an unknown or invalid option, or if the server's namespace or vocabulary
            differs.
        MissingExtraError: when the engine's library is not installed.
        EngineUnavailableError: when a server does not answer.
        ModelLoadError: when the model cannot be loaded.
        StoreError: when ``kv_path`` cannot be used.
    """
    from cacheblend_rag.settings import EngineConfig

    if "api_key" in options:  # tracebacks may show this frame
        options["api_key"] = Secret.of(options["api_key"])
    if not isinstance(engine, EngineConfig):
        blend = {} if config is None else {"blend": config}
        engine = EngineConfig.gather(engine=engine, **blend, **options)
    elif config is not None or options:
        raise ConfigError("an EngineConfig holds all settings: change it by with_changes()")
    from cacheblend_rag.engines.backend import checked_config

    checked_config(engine.blend)
    opened = _open(engine)
    logger.info("engine: %s", opened.name)
    tuned_on = engine.profile.model if engine.profile else ""
    if tuned_on and tuned_on != opened.model_name:
        logger.warning(
            "the profile was tuned on %s, the model is %s: run `tune`", tuned_on, opened.model_name
        )
    return opened


def _open(config: EngineConfig) -> Engine:
    kind = pick_engine(config) if config.engine == AUTO else config.engine
    if kind == EMBEDDED:
        return open_transformers(config)
    if not isinstance(config.model, str | Path):
        where = f"engine={VLLM!r}" if kind == VLLM else "a server's URL as engine"
        raise ConfigError(f"model must be a name or a folder with {where}")
    return open_vllm(config) if kind == VLLM else _open_server(config)


def pick_engine(config: EngineConfig) -> str:
    """Return the kind of engine that ``auto`` selects here for a config; logs why."""
    import torch

    if not isinstance(config.model, str | Path):
        picked, why = EMBEDDED, "the model is loaded already"
    elif config.device is not None:
        picked, why = EMBEDDED, f"device={config.device!r} was asked for"
    elif find_spec("vllm") is None:
        picked, why = EMBEDDED, "vLLM is not installed"
    elif not torch.cuda.is_available():
        picked, why = EMBEDDED, "there is no CUDA device"
    else:
        picked, why = VLLM, "vLLM is installed and there is a CUDA device"
    logger.info("engine='auto' is %r: %s", picked, why)
    return picked


def _open_server(config: EngineConfig) -> Engine:
    from cacheblend_rag.engines.vllm.connection import VLLMServer
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

    common = _common(config)
    server = VLLMServer(config.engine, model=config.model or None, api_key=config.api_key)
    return VLLMEngine(server, **common)


def open_vllm(config: EngineConfig) -> Engine:
    """Open an engine over vLLM in this process; raises MissingExtraError without vLLM."""
    if find_spec("vllm") is None:
        raise MissingExtraError(f"engine={VLLM!r}", "vllm")
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
    from cacheblend_rag.engines.vllm.engine import VLLMEngine
    from cacheblend_rag.engines.vllm.in_process import InProcessVLLM

    common = _common(config)
    common["tokenizer"] = config.tokenizer or load_tokenizer(config.model)  # before vLLM starts
    transport = InProcessVLLM(
        config.model,
        ConnectorSettings(store=config.store, namespace=config.namespace),
        dtype=config.dtype or "auto",
    )
    return VLLMEngine(transport, **common)


def open_transformers(config: EngineConfig) -> Engine:
    """Open the embedded engine."""
    from cacheblend_rag.engines.catalog_places import place_of
    from cacheblend_rag.engines.identity import put_label
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.engines.transformers.loading import pick_device
    from cacheblend_rag.kv.store import TieredKVStore

    engine = TransformersEngine(
        config.model,
        store=TieredKVStore.of(config.store, device=pick_device(config.device)),
        device=config.device,
        dtype=config.dtype,
        catalog=place_of(config.store),
        **_common(config),
    )
    if config.store.kv_path is not None and not config.store.read_only:
        put_label(Path(config.store.kv_path), engine)
    return engine


def _common(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments that every kind of engine takes."""
    kept = config.store
    return {
        "tokenizer": config.tokenizer,
        "config": config.blend,
        "registry": open_registry(
            Path(kept.kv_path) if kept.kv_path else None, config.namespace, read_only=kept.read_only
        ),
        "instruction": config.instruction,
        "namespace": config.namespace,
        "lead_in": config.lead_in,
        "fill_on_miss": config.fill_on_miss,
        "guard": config.guard,
    }


def open_registry(kv_path: Path | None, namespace: str, *, read_only: bool) -> ChunkRegistry:
    """Return the registry of a namespace's known chunks beside their KV.

    It is in memory without a ``kv_path``, and an empty one where nothing may be written and nothing
    is there.
    """
    from cacheblend_rag.text.registry import ChunkRegistry
    from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry

    if kv_path is None:
        return ChunkRegistry()
    from cacheblend_rag.kv.chunk_kv import namespace_id

    own = kv_path / f"chunks-{namespace_id(namespace)}.sqlite"
    if read_only and not own.exists():
        logger.warning(
            "%s holds no known chunks of this namespace: open the engine again after others have "
            "indexed some",
            kv_path,
        )
        return ChunkRegistry()
    return SharedChunkRegistry(own, read_only=read_only)
