"""The engines that are compared: one a lead-in, around one model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

from cacheblend_rag.config import BlendConfig, LeadIn, StoreConfig
from cacheblend_rag.engines.factory import EMBEDDED, VLLM
from cacheblend_rag.engines.naming import source_of
from cacheblend_rag.engines.quiet import quiet_libraries
from cacheblend_rag.errors import UnsupportedModelError

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.engines.vllm.serve import RunningServer

HOST_BYTES = 2 << 30
CPU_KV_SPACE, SERVED_KV_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"


def open_engines(
    model: str,
    lead_ins: Sequence[LeadIn],
    *,
    instruction: str,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[LeadIn, TransformersEngine]:
    """Return one engine a lead-in, all around the same loaded model, with KV in host memory.

    model: as open_engine takes it. instruction: the text before the first chunk, exactly as
    prompts hold it.
    Raises UnsupportedModelError when the model's KV cannot be blended.
    """
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.kv.store import TieredKVStore

    quiet_libraries()
    engines: dict[LeadIn, TransformersEngine] = {}
    loaded: TransformersEngine | None = None
    for lead_in in lead_ins:
        engines[lead_in] = loaded = TransformersEngine(
            loaded.model if loaded else source_of(model),
            tokenizer=loaded.tokenizer if loaded else None,
            config=BlendConfig(min_tokens=0),
            lead_in=lead_in,
            store=TieredKVStore.open(host_bytes=HOST_BYTES),
            instruction=instruction,
            device=device,
            dtype=dtype,
        )
    if loaded and loaded.blend_refusal:
        raise UnsupportedModelError(f"model={model!r} cannot be blended: {loaded.blend_refusal}")
    return engines


@contextmanager
def opened_engines(
    engine: str,
    model: str,
    lead_ins: Sequence[LeadIn],
    *,
    instruction: str,
    device: str | None = None,
    dtype: str | None = None,
) -> Iterator[Mapping[LeadIn, Engine]]:
    """Yield one engine a lead-in, all around the same loaded model, until the block is left.

    engine: ``transformers``, ``vllm`` (a server that runs meanwhile) or the URL of a server. model,
    instruction: as in open_engines.
    Raises UnsupportedModelError when the model's KV cannot be blended, what running_server and
    VLLMServerEngine raise.
    """
    if engine == EMBEDDED:
        yield open_engines(model, lead_ins, instruction=instruction, device=device, dtype=dtype)
        return
    from cacheblend_rag.engines.vllm.server import VLLMServerEngine

    quiet_libraries()
    source = source_of(model)
    with ExitStack() as stack:
        url = engine
        if engine == VLLM:
            url = stack.enter_context(_server(source, dtype)).url
        engines: dict[LeadIn, Engine] = {}
        for lead_in in lead_ins:
            config = BlendConfig(min_tokens=0)
            client = VLLMServerEngine(
                url, model=source, config=config, lead_in=lead_in, instruction=instruction
            )
            stack.callback(client.close)
            if not client.status.active:
                refusal = client.status.refusal
                raise UnsupportedModelError(f"model={model!r} cannot be blended: {refusal}")
            engines[lead_in] = client
        yield engines


def _server(model: str, dtype: str | None) -> AbstractContextManager[RunningServer]:
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
    from cacheblend_rag.engines.vllm.serve import running_server

    environment = {} if CPU_KV_SPACE in os.environ else {CPU_KV_SPACE: SERVED_KV_GIB}
    flags = ["--dtype", dtype or "auto"]
    settings = ConnectorSettings(StoreConfig(host_bytes=HOST_BYTES))
    return running_server(model, flags=flags, settings=settings, environment=environment)
