"""Opens the engines of an evaluation: one per lead-in, around one model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models import resolve
from cacheblend_rag.settings import EMBEDDED, VLLM, BlendConfig, LeadInKind, StoreConfig

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.vllm.serve import RunningServer

HOST_BYTES = 2 << 30
CPU_KV_SPACE, SERVED_KV_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"


@contextmanager
def opened_engines(
    engine: str,
    model: str,
    lead_ins: Sequence[LeadInKind],
    *,
    instruction: str,
    store: StoreConfig | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Iterator[Mapping[LeadInKind, Engine]]:
    """Yield one engine per lead-in, all around the same loaded model, until the block is left.

    engine: ``transformers``, ``vllm`` (starts a server) or the URL of a server. model:
    as for open_engine. instruction: the exact text of prompts before the first chunk. store: by
    default memory enough for one prompt. Raises UnsupportedModelError when the model's KV cannot be
    blended, and the errors of running_server and open_engine.
    """
    from cacheblend_rag.engines.factory import open_engine

    quiet_libraries()
    kept = store or StoreConfig(host_bytes=HOST_BYTES)
    with ExitStack() as stack:
        where = engine
        if engine == VLLM:
            where = stack.enter_context(_server(resolve(model), dtype, kept)).url
        own = where == EMBEDDED
        first = open_engine(
            where,
            model=model,
            config=BlendConfig(min_tokens=0),
            lead_in=lead_ins[0],
            store=kept if own else StoreConfig(),
            instruction=instruction,
            device=device if own else None,
            dtype=dtype if own else None,
        )
        stack.callback(first.close)
        if first.blend_refusal:
            raise UnsupportedModelError(f"model={model!r} cannot be blended: {first.blend_refusal}")
        yield {
            lead_in: first if index == 0 else first.sibling(lead_in=lead_in)
            for index, lead_in in enumerate(lead_ins)
        }


def _server(
    model: str, dtype: str | None, store: StoreConfig
) -> AbstractContextManager[RunningServer]:
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
    from cacheblend_rag.engines.vllm.serve import running_server

    environment = {} if CPU_KV_SPACE in os.environ else {CPU_KV_SPACE: SERVED_KV_GIB}
    flags = ["--dtype", dtype or "auto"]
    settings = ConnectorSettings(store=store)
    return running_server(model, flags=flags, settings=settings, environment=environment)
