"""open_engine: an engine by name, with a folder that keeps its chunk KV and known chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from cacheblend_rag.chunks import ChunkRegistry
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.errors import ConfigError, EngineUnavailableError, MissingExtraError
from cacheblend_rag.shared_registry import SharedChunkRegistry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.prompt import Tokenizer

logger = logging.getLogger(__name__)

DEMO_MODEL = "demo"
ENGINES = ("auto", "transformers", "vllm")
SERVER_SECONDS = 5.0


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
    api_key: str | None = None,
) -> Engine:
    """Return an engine.

    engine: ``transformers`` (embedded), ``vllm`` (by name only; not yet complete, see the
        changelog), the URL of a vLLM server, or ``auto``, which is the embedded one.
    model: a hub name, a local folder, ``demo`` (the bundled model) or a loaded model. tokenizer:
        the model's own by default; must be given with a loaded model.
    instruction: what prompts say before their first chunk; lead-ins compute chunks behind it. A
        function is given the model's tokenizer and returns it.
    namespace: tenants with different namespaces share neither KV nor known chunks.
    kv_path: a folder for chunk KV and the registry of known chunks, shared between processes;
        None keeps both in this process' memory. host_bytes: memory for chunk KV. disk_bytes: room
        for it in ``kv_path``, None is without limit.
    api_key: what a server asks for; it is never logged.

    Raises ConfigError for an unknown engine, MissingExtraError when the engine's library is not
    installed, EngineUnavailableError when a server does not answer, ModelLoadError when the model
    cannot be loaded, StoreError when ``kv_path`` cannot be used.
    """
    if engine.startswith(("http://", "https://")):
        raise _no_server(engine, api_key)
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} must be {', '.join(ENGINES)} or a server's URL")
    shared: dict[str, Any] = {
        "tokenizer": tokenizer,
        "config": config,
        "registry": _open_registry(kv_path, namespace),
        "instruction": instruction,
        "namespace": namespace,
        "dtype": dtype,
    }
    room: dict[str, Any] = {"host_bytes": host_bytes, "disk_bytes": disk_bytes}
    if engine == "vllm":
        opened = _open_vllm(model, kv_path=kv_path, **room, **shared)
    else:
        opened = _open_transformers(model, device, kv_path=kv_path, **room, **shared)
    if model == DEMO_MODEL:
        opened.model_name = DEMO_MODEL
    logger.info("engine: %s", opened.name)
    return opened


def _open_vllm(model: Any, *, dtype: Any, **options: Any) -> Engine:
    if find_spec("vllm") is None:
        raise MissingExtraError("engine='vllm'", "vllm")
    if not isinstance(model, str | Path):
        raise ConfigError("model must be a name or a folder with engine='vllm'")
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

    precision = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    return VLLMEngine(_named(model), dtype=precision, **options)


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
    return TransformersEngine(_named(model), store=store, device=device, **options)


def load_tokenizer(model: str | Path) -> Any:
    """Return a model's tokenizer without its weights; raises ModelLoadError.

    model: as for open_engine, by name.
    """
    from cacheblend_rag.engines.transformers import loading

    return loading.load_tokenizer(_named(model))


def _named(model: Any) -> Any:
    return MODEL_FOLDER if model == DEMO_MODEL else model


def _open_registry(kv_path: str | Path | None, namespace: str) -> ChunkRegistry:
    if kv_path is None:
        return ChunkRegistry()
    from cacheblend_rag.kv.chunk_kv import namespace_id

    return SharedChunkRegistry(Path(kv_path) / f"chunks-{namespace_id(namespace)}.sqlite")


def _no_server(url: str, api_key: str | None) -> EngineUnavailableError:
    """Say why the server at ``url`` cannot be used."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = Request(f"{url.rstrip('/')}/health", headers=headers)  # noqa: S310
    try:
        with urlopen(request, timeout=SERVER_SECONDS):  # noqa: S310
            pass
    except HTTPError:
        pass
    except (OSError, HTTPException, ValueError) as error:
        return EngineUnavailableError(
            f"engine={url!r}: no server answers there ({error}); start it or give another URL"
        )
    return EngineUnavailableError(
        f"engine={url!r}: servers are not supported by this version: use engine='transformers'"
    )
