"""Starts comparable vLLM engines with a shape's random model, saved to a folder, or a named one.

KV caches have a fixed size, and on a CPU all engines compute on the same cores. By default,
vLLM sizes its cache by the free memory, and reserves one core, and another one with
a KV connector, so that engines would not be comparable.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cacheblend_rag.bench.plans import TtftPlan
from cacheblend_rag.bench.shapes import NamedModel
from cacheblend_rag.bench.workload import LEAD_IN
from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.models import resolve

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
    from cacheblend_rag.engines.vllm.engine import VLLMEngine
    from cacheblend_rag.engines.vllm.transport import Transport

VLLMKind = Literal["vllm", "vllm-server"]
SPARE_TOKENS = 256
GPU_SHARE = 0.9
BLOCK_TOKENS = 128


@contextmanager
def served_model(plan: TtftPlan) -> Iterator[Path | str]:
    """Yield a folder with a plan's random model, in the hub's format; it is removed at the end.

    Of a named model it is that model's folder or hub name.
    """
    subject = plan.subject
    if isinstance(subject, NamedModel):
        yield resolve(subject.name)
        return
    with tempfile.TemporaryDirectory(prefix="cacheblend-model-") as name:
        subject.save(Path(name), dtype=plan.torch_dtype, device=plan.torch_device)
        if plan.torch_device.type == "cuda":
            torch.cuda.empty_cache()
        yield Path(name)


def engine_options(plan: TtftPlan, prompt_tokens: int, prompts: int) -> dict[str, Any]:
    """Return vLLM's engine arguments for a workload.

    prompt_tokens: of the longest prompt with its answer. prompts: how many of them the KV cache
    must hold.
    """
    window = -(-(prompt_tokens + SPARE_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS
    options: dict[str, Any] = {
        "dtype": str(plan.torch_dtype).removeprefix("torch."),
        "max_model_len": min(plan.subject.max_positions, window),
        "enforce_eager": plan.eager,
        "kv_cache_memory_bytes": plan.subject.kv_bytes(window * prompts, plan.torch_dtype),
    }
    if torch.cuda.is_available():
        options["gpu_memory_utilization"] = GPU_SHARE
    return options


@contextmanager
def running_vllm(
    kind: VLLMKind,
    model: Path | str,
    *,
    options: dict[str, Any],
    connector: bool = True,
    settings: ConnectorSettings | None = None,
) -> Iterator[VLLMEngine]:
    """Yield an engine over vLLM, in process or in a server, which is stopped at the end.

    model: a folder or a hub name. options: engine arguments. connector: False is vLLM as it is.
    settings: the connector's. Raises MissingExtraError without vLLM.
    """
    if find_spec("vllm") is None:
        raise MissingExtraError(f"engine={kind!r}", "vllm")
    _settle_environment()
    if kind == "vllm":
        from cacheblend_rag.engines.vllm.in_process import InProcessVLLM

        arguments = {"disable_log_stats": True, **options}
        if not connector:
            arguments["kv_transfer_config"] = None
        with _engine_over(InProcessVLLM(model, settings, **arguments)) as engine:
            yield engine
    else:
        from cacheblend_rag.engines.vllm.connection import VLLMServer
        from cacheblend_rag.engines.vllm.serve import running_server

        flags = ["--disable-log-stats", *_flags(options)]
        with (
            running_server(model, flags=flags, connector=connector, settings=settings) as server,
            _engine_over(VLLMServer(server.url, model=model)) as engine,
        ):
            yield engine


def _engine_over(transport: Transport) -> closing[VLLMEngine]:
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

    return closing(VLLMEngine(transport, lead_in=LEAD_IN))


def _flags(options: dict[str, Any]) -> list[str]:
    """Return engine arguments as flags of the server."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _settle_environment() -> None:
    """Set environment variables of vLLM, unless they are set already."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
