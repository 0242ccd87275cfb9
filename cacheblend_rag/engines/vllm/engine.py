"""VLLMEngine: vLLM started by this process, with the connector in its workers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cacheblend_rag.chunks import ChunkRegistry
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engines.base import SamplingParams
from cacheblend_rag.engines.naming import public_name
from cacheblend_rag.engines.vllm.client import Piece, VLLMClient, VLLMRequest
from cacheblend_rag.errors import MissingExtraError, ModelLoadError
from cacheblend_rag.prompt import Tokenizer

CONNECTOR = "cacheblend_rag.engines.vllm.connector"


class VLLMEngine(VLLMClient):
    """CacheBlend on vLLM in process.

    model: a hub name or a local folder. kv_path: folder for chunk KV, shared with other workers and
    engines; None is memory only. host_bytes: memory for chunk KV, in each worker. options: further
    arguments of vLLM's AsyncEngineArgs (``max_model_len``, ``tensor_parallel_size``, ...).
    attention, asynchronous, slice_seconds: see ConnectorSettings.

    Raises MissingExtraError without vLLM, ModelLoadError when vLLM does not start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: Any = None,
        config: BlendConfig | None = None,
        registry: ChunkRegistry | None = None,
        instruction: str | Callable[[Tokenizer], str] = "",
        namespace: str = "default",
        kv_path: str | Path | None = None,
        host_bytes: int = 4 << 30,
        disk_bytes: int | None = None,
        dtype: str = "auto",
        attention: str = "auto",
        asynchronous: bool = True,
        **options: Any,
    ) -> None:
        try:
            from vllm.config import KVTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise MissingExtraError("the vLLM engine", "vllm") from error
        transfer = KVTransferConfig(
            kv_connector="CacheBlendConnector",
            kv_connector_module_path=CONNECTOR,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "kv_path": None if kv_path is None else str(kv_path),
                "host_bytes": host_bytes,
                "disk_bytes": disk_bytes,
                "namespace": namespace,
                "attention": attention,
                "asynchronous": asynchronous,
            },
        )
        arguments = AsyncEngineArgs(
            model=str(model), dtype=dtype, kv_transfer_config=transfer, **options
        )
        from transformers import AutoTokenizer

        try:
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(str(model))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"tokenizer of {str(model)!r} could not be loaded") from error
        super().__init__(public_name(str(model)), tokenizer, config, registry, instruction)

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        try:
            self._vllm = self._run(start())
        except (RuntimeError, ValueError, OSError) as error:
            super().close()
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelLoadError(f"vLLM does not start with {str(model)!r}: {line}") from error

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""
        return int(self._vllm.model_config.max_model_len)

    async def _send(self, request: VLLMRequest) -> AsyncIterator[Piece]:
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": request.salt}
        outputs = self._vllm.generate(prompt, _sampling(request), f"cacheblend-{uuid.uuid4().hex}")
        async with aclosing(outputs) as steps:
            async for step in steps:
                out = step.outputs[0]
                yield Piece(
                    out.text, tuple(out.token_ids), out.finish_reason, step.kv_transfer_params
                )

    def close(self) -> None:
        """Stop vLLM's workers."""

        async def stop() -> None:
            self._vllm.shutdown()

        self._run(stop())
        del self._vllm  # it cleans up after itself, which fails once the interpreter shuts down
        super().close()


def _sampling(request: VLLMRequest) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked: SamplingParams = request.sampling
    plain = asdict(asked)
    plain["stop"] = list(asked.stop)
    plain["top_k"] = asked.top_k or -1
    return VLLMSamplingParams(
        **plain,
        output_kind=RequestOutputKind.DELTA,
        extra_args=({"kv_transfer_params": request.order.to_params()} if request.order else None),
    )
