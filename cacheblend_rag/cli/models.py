"""The models that commands run on: the bundled one or any local folder, one engine a lead-in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.config import BlendConfig, LeadIn, StoreConfig
from cacheblend_rag.engines.factory import EMBEDDED, VLLM
from cacheblend_rag.engines.naming import check_source, source_of
from cacheblend_rag.engines.quiet import quiet_libraries
from cacheblend_rag.errors import ModelLoadError, UnsupportedModelError
from cacheblend_rag.rag.checks import DTYPES

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.engines.vllm.serve import RunningServer

HOST_BYTES = 2 << 30
CPU_KV_SPACE, SERVED_KV_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"

ModelOption = Annotated[
    str,
    typer.Option("--model", help="'demo' (the bundled model) or a local hub-format model folder."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, mps, ...; the best one by default.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="'transformers', 'vllm' or the URL of a `serve`; CACHEBLEND_API_KEY is its key.",
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)}; the model's by default.")
]


def model_folder(name: str) -> Path:
    """Return the folder of ``demo`` or of a local model; raises ModelLoadError when it is none."""
    folder = Path(source_of(name))
    if not folder.is_dir():
        raise ModelLoadError(f"model={name!r}: there is no such folder; give one or 'demo'")
    check_source(name)
    return folder


def open_engines(
    model: str,
    lead_ins: Sequence[LeadIn],
    *,
    instruction: str,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[LeadIn, TransformersEngine]:
    """Return one engine a lead-in, all around the same loaded model, with KV in host memory.

    instruction: the text before the first chunk, exactly as prompts hold it.
    Raises UnsupportedModelError when the model's KV cannot be blended.
    """
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.kv.store import TieredKVStore

    quiet_libraries()
    engines: dict[LeadIn, TransformersEngine] = {}
    loaded: TransformersEngine | None = None
    for lead_in in lead_ins:
        engines[lead_in] = loaded = TransformersEngine(
            loaded.model if loaded else model_folder(model),
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

    engine: ``transformers``, ``vllm`` (a server that runs meanwhile) or the URL of a server.
    Raises UnsupportedModelError when the model's KV cannot be blended, what running_server and
    VLLMServerEngine raise.
    """
    if engine == EMBEDDED:
        yield open_engines(model, lead_ins, instruction=instruction, device=device, dtype=dtype)
        return
    from cacheblend_rag.engines.vllm.server import VLLMServerEngine

    quiet_libraries()
    folder = model_folder(model)
    with ExitStack() as stack:
        url = engine
        if engine == VLLM:
            url = stack.enter_context(_server(folder, dtype)).url
        engines: dict[LeadIn, Engine] = {}
        for lead_in in lead_ins:
            config = BlendConfig(min_tokens=0)
            client = VLLMServerEngine(
                url, model=folder, config=config, lead_in=lead_in, instruction=instruction
            )
            stack.callback(client.close)
            if not client.status.active:
                refusal = client.status.refusal
                raise UnsupportedModelError(f"model={model!r} cannot be blended: {refusal}")
            engines[lead_in] = client
        yield engines


def _server(folder: Path, dtype: str | None) -> AbstractContextManager[RunningServer]:
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
    from cacheblend_rag.engines.vllm.serve import running_server

    environment = {} if CPU_KV_SPACE in os.environ else {CPU_KV_SPACE: SERVED_KV_GIB}
    flags = ["--dtype", dtype or "auto"]
    settings = ConnectorSettings(StoreConfig(host_bytes=HOST_BYTES))
    return running_server(folder, flags=flags, settings=settings, environment=environment)
