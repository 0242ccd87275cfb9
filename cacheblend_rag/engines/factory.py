"""open_engine: an engine by name, with a folder that keeps its chunk KV and known chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.arguments import check_engine_name
from cacheblend_rag.config import BlendConfig, StoreConfig
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.secret import Secret
from cacheblend_rag.text.registry import ChunkRegistry
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.text.encoder import Tokenizer

logger = logging.getLogger(__name__)

EMBEDDED, VLLM = "transformers", "vllm"
ENGINES = ("auto", EMBEDDED, VLLM)


def open_engine(
    engine: str = "auto",
    *,
    model: str | Path | PreTrainedModel,
    tokenizer: Any = None,
    config: BlendConfig | None = None,
    instruction: str | Callable[[Tokenizer], str] = "",
    namespace: str = "default",
    kv_path: str | Path | None = None,
    host_bytes: int = 4 << 30,
    disk_bytes: int | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    api_key: str | Secret | None = None,
) -> Engine:
    """Return an engine.

    engine: ``transformers`` (embedded), ``vllm`` (in this process), the URL of a server that
        ``cacheblend-rag serve`` started, or ``auto``: vLLM where it is installed and there is a
        CUDA device, else the embedded one; which and why is logged.
    model: a hub name, a local folder, ``demo`` (the bundled model) or a loaded model (embedded
        engine only). With a URL it names the tokenizer, and "" takes what the server says that it
        loaded. tokenizer: the model's own by default; must be given with a loaded model.
    instruction: what prompts say before their first chunk; lead-ins compute chunks behind it. A
        function is given the model's tokenizer and returns it.
    namespace: tenants with different namespaces share neither KV nor known chunks.
    kv_path: a folder for chunk KV and the registry of known chunks, shared between processes;
        None keeps both in this process' memory. host_bytes: memory for chunk KV. disk_bytes: room
        for it in ``kv_path``, None is without limit. A server has a store of its own: of these,
        only the registry in ``kv_path`` is used with a URL.
    device, dtype: where and how precise the model runs; a server has settled both.
    api_key: what a server asks for, the environment's CACHEBLEND_API_KEY by default; it is never
        logged.

    Raises ConfigError for an unknown engine or a server's other namespace or vocabulary,
    MissingExtraError when the engine's library is not installed, EngineUnavailableError when a
    server does not answer, ModelLoadError when the model cannot be loaded, StoreError when
    ``kv_path`` cannot be used.
    """
    from cacheblend_rag.engines.front import checked

    config, api_key = checked(config), Secret.of(api_key)
    check_engine_name(engine, ENGINES)
    if engine == "auto":
        engine = _pick_engine(model, device)
    shared: dict[str, Any] = {
        "tokenizer": tokenizer,
        "config": config,
        "registry": _open_registry(kv_path, namespace),
        "instruction": instruction,
        "namespace": namespace,
    }
    room: dict[str, Any] = {"host_bytes": host_bytes, "disk_bytes": disk_bytes}
    opened: Engine
    if _is_url(engine):
        opened = _open_server(engine, model, api_key, **shared)
    elif engine == "vllm":
        store = StoreConfig(None if kv_path is None else str(kv_path), **room)
        opened = _open_vllm(model, store, dtype=dtype, **shared)
    else:
        opened = _open_transformers(model, device, dtype=dtype, kv_path=kv_path, **room, **shared)
    logger.info("engine: %s", opened.name)
    return opened


def _is_url(engine: str) -> bool:
    return engine.startswith(("http://", "https://"))


def _pick_engine(model: Any, device: str | None) -> str:
    """Return what ``auto`` stands for here."""
    import torch

    if not isinstance(model, str | Path):
        picked, why = "transformers", "the model is loaded already"
    elif device is not None:
        picked, why = "transformers", f"device={device!r} was asked for"
    elif find_spec("vllm") is None:
        picked, why = "transformers", "vLLM is not installed"
    elif not torch.cuda.is_available():
        picked, why = "transformers", "there is no CUDA device"
    else:
        picked, why = "vllm", "vLLM is installed and there is a CUDA device"
    logger.info("engine='auto' is %r: %s", picked, why)
    return picked


def _open_server(url: str, model: Any, api_key: Secret | None, **options: Any) -> Engine:
    if not isinstance(model, str | Path):
        raise ConfigError("model must be a name or a folder with a server's URL as engine")
    from cacheblend_rag.engines.vllm.server import VLLMServerEngine

    return VLLMServerEngine(url, model=model or None, api_key=api_key, **options)


def _open_vllm(model: Any, store: StoreConfig, *, dtype: Any, **options: Any) -> Engine:
    if find_spec("vllm") is None:
        raise MissingExtraError("engine='vllm'", "vllm")
    if not isinstance(model, str | Path):
        raise ConfigError("model must be a name or a folder with engine='vllm'")
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

    precision = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    return VLLMEngine(model, settings=ConnectorSettings(store), dtype=precision, **options)


def _open_transformers(
    model: Any,
    device: str | None,
    *,
    kv_path: str | Path | None,
    host_bytes: int,
    disk_bytes: int | None,
    **options: Any,
) -> Engine:
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.kv.store import TieredKVStore

    store = TieredKVStore.open(host_bytes=host_bytes, disk_path=kv_path, disk_bytes=disk_bytes)
    return TransformersEngine(model, store=store, device=device, **options)


def load_tokenizer(model: str | Path) -> Any:
    """Return a model's tokenizer without its weights; raises ModelLoadError.

    model: as for open_engine, by name.
    """
    from cacheblend_rag.engines.transformers import loading

    return loading.load_tokenizer(model)


def _open_registry(kv_path: str | Path | None, namespace: str) -> ChunkRegistry:
    if kv_path is None:
        return ChunkRegistry()
    from cacheblend_rag.kv.chunk_kv import namespace_id

    own = Path(kv_path) / f"chunks-{namespace_id(namespace)}.sqlite"
    old = sorted(path.name for path in Path(kv_path).glob("chunks-??????.sqlite"))
    if old and not own.exists():
        logger.warning(
            "%s in %s is a registry of an older version, in which namespaces may be mixed: index "
            "again, or rename it to %s if one namespace alone wrote it",
            old[0],
            kv_path,
            own.name,
        )
    return SharedChunkRegistry(own)
