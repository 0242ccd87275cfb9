"""VLLMEngine: vLLM started by this process, with the connector in its workers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cacheblend_rag.config import BlendConfig, LeadInConfig
from cacheblend_rag.engines.base import SamplingParams
from cacheblend_rag.engines.front import settled
from cacheblend_rag.engines.naming import check_source, public_name, source_of
from cacheblend_rag.engines.transformers.loading import load_tokenizer
from cacheblend_rag.engines.vllm.background import BackgroundLoop
from cacheblend_rag.engines.vllm.client import Piece, VLLMClient, VLLMRequest
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.versions import check_version
from cacheblend_rag.errors import (
    CacheBlendError,
    EngineUnavailableError,
    MissingExtraError,
    ModelLoadError,
)
from cacheblend_rag.text.encoder import Tokenizer
from cacheblend_rag.text.registry import ChunkRegistry


class VLLMEngine(VLLMClient):
    """CacheBlend on vLLM in process.

    model: a hub name, a local folder or ``demo`` (the bundled model). settings: the connector's;
    namespace and replicas are this engine's own. options: further arguments of vLLM's
    AsyncEngineArgs (``max_model_len``, ``tensor_parallel_size``, ...);
    ``kv_transfer_config=None`` is vLLM without the connector, which blends nothing.

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
        lead_in: LeadInConfig | str | None = None,
        settings: ConnectorSettings | None = None,
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        config, lead_in = settled(config, lead_in)
        check_source(model)
        try:
            from vllm import __version__
            from vllm.config import KVTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise MissingExtraError("the vLLM engine", "vllm") from error
        check_version(__version__)
        settings = (settings or ConnectorSettings()).with_changes(
            namespace=namespace, replicas=int(options.get("data_parallel_size", 1))
        )
        transfer = KVTransferConfig(**settings.to_transfer_config())
        options.setdefault("kv_transfer_config", transfer)
        arguments = AsyncEngineArgs(model=source_of(model), dtype=dtype, **options)
        background = BackgroundLoop("cacheblend-vllm")

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        try:
            tokenizer = tokenizer or load_tokenizer(model)
            self._vllm = background.run(start())
        except CacheBlendError:
            background.close()
            raise
        except (RuntimeError, ValueError, OSError) as error:
            background.close()
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelLoadError(f"vLLM does not start with {str(model)!r}: {line}") from error
        self._background = background
        self._window = int(self._vllm.model_config.max_model_len)
        try:
            super().__init__(
                public_name(str(model)),
                tokenizer,
                config=config,
                registry=registry,
                instruction=instruction,
                namespace=namespace,
                lead_in=lead_in,
                background=background,
            )
        except BaseException:
            self.close()
            raise

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""
        return self._window

    async def _send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
        if request.salt is not None:
            prompt["cache_salt"] = request.salt
        sampling = _sampling(request)
        outputs = self._vllm.generate(
            prompt,
            sampling,
            f"cacheblend-{uuid.uuid4().hex}",
            data_parallel_rank=request.replica,
        )
        async with aclosing(outputs) as steps:
            try:
                async for step in steps:
                    yield _piece(step)
            except EngineDeadError as error:
                raise EngineUnavailableError("vLLM has ended with an error; see its log") from error

    def close(self) -> None:
        """Stop vLLM's workers."""
        if not self.is_open:
            return

        async def stop() -> None:
            self._vllm.shutdown()

        self._background.give_up()
        self._run(stop())
        del self._vllm  # it cleans up after itself, which fails once the interpreter shuts down
        super().close()


def _piece(step: Any) -> Piece:
    out = step.outputs[0]
    return Piece(
        out.text, tuple(out.token_ids), out.finish_reason, out.stop_reason, step.kv_transfer_params
    )


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
