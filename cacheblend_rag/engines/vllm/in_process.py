"""The transports to a vLLM in this process: one that is started here, or the server's own."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import reduce
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.answer import RawLogprob
from cacheblend_rag.engines.model_files import load_tokenizer, vllm_generation_values
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.stream import BackgroundLoop, GivenLoop
from cacheblend_rag.engines.structured import ONE_LINE
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.namespaces import carry, current, current_job
from cacheblend_rag.engines.vllm.protocol.job import SALT_PREFIX, Job
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_CONNECTOR,
    NO_REPORT,
    Failed,
    Result,
    joined,
    result_of,
)
from cacheblend_rag.engines.vllm.transport import Piece, Transport, VLLMRequest
from cacheblend_rag.engines.vllm.versions import check_allocator, check_version, memory_share
from cacheblend_rag.errors import (
    CacheBlendError,
    EngineUnavailableError,
    MissingExtraError,
    ModelLoadError,
)
from cacheblend_rag.models import public_name, resolve


class InProcessVLLM(Transport):
    """vLLM's asynchronous engine, started here.

    vllm: the engine, an AsyncLLM, until this is closed.
    """

    name = address = "vllm"

    def __init__(
        self,
        model: str | Path,
        settings: ConnectorSettings | None = None,
        *,
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        """Start vLLM.

        Args:
            model: as models.resolve takes it: a hub name, a folder, a GGUF file, ``smollm2``, ...
            settings: the connector's.
            dtype: precision of the weights.
            options: further arguments of vLLM's AsyncEngineArgs (``max_model_len``,
                ``tensor_parallel_size``, ...); ``kv_transfer_config=None`` is vLLM without the
                connector, which blends nothing. ``gpu_memory_utilization`` is 0.85 with a GPU and
                0.5 without one unless it is given, and JSON is written without blanks.

        Raises:
            MissingExtraError: without vLLM.
            EngineUnavailableError: when it is too old.
            ConfigError: when it would start with no KV connector.
            ModelLoadError: when it does not start.
        """
        super().__init__()
        source = resolve(model)
        try:
            from vllm import __version__
            from vllm.config import KVTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise MissingExtraError("the vLLM engine", "vllm") from error
        check_version(__version__)
        replicas = int(options.get("data_parallel_size", 1))
        settings = (settings or ConnectorSettings()).with_changes(replicas=replicas)
        options.setdefault("kv_transfer_config", KVTransferConfig(**settings.to_transfer_config()))
        options.setdefault("structured_outputs_config", ONE_LINE)
        if options["kv_transfer_config"] is not None:
            pools = (options.get("enable_sleep_mode"), options.get("enable_cumem_allocator"))
            check_allocator(has_own_pool=any(pools))
            options.setdefault("gpu_memory_utilization", memory_share())
        os.environ.update(settings.store.environment())  # workers are started from here
        arguments = AsyncEngineArgs(model=source, dtype=dtype, **options)
        self._model, self.model_name = model, public_name(str(model))
        self.background = BackgroundLoop("cacheblend-vllm")

        async def start() -> Any:
            vllm = AsyncLLM.from_engine_args(arguments)
            carry(vllm)
            return vllm

        try:
            self.vllm = self.run(start())
        except CacheBlendError:
            self.background.close()
            raise
        except (RuntimeError, ValueError, OSError) as error:
            self.background.close()
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelLoadError(f"vLLM does not start with {str(model)!r}: {line}") from error
        self.context_window = int(self.vllm.model_config.max_model_len)
        self._settings = settings

    def load_tokenizer(self) -> Any:
        """Return the model's tokenizer; raises ModelLoadError."""
        return load_tokenizer(self._model)

    def generation_values(self) -> Mapping[str, Any]:
        """Return the fields of the model's generation_config, overridden by vLLM's options."""
        return vllm_generation_values(self.vllm.model_config)

    async def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        """Answer a request, always piece by piece."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            from vllm.exceptions import VLLMClientError
        except ImportError:  # vLLM 0.26 raises ValueError
            VLLMClientError = ValueError

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
        if request.salt is not None:
            prompt["cache_salt"] = request.salt
        outputs = self.vllm.generate(
            prompt,
            self._parameters(request),
            f"cacheblend-{request.request_id or uuid.uuid4().hex}",
            data_parallel_rank=request.replica,
            trace_headers=dict(request.headers) or None,
        )
        async with aclosing(outputs) as steps:
            try:
                async for step in steps:
                    yield _piece(step, request.sampling.logprobs)
            except EngineDeadError as error:
                raise EngineUnavailableError("vLLM has ended with an error; see its log") from error
            except (VLLMClientError, ValueError) as error:
                if request.sampling.structured_outputs is None:
                    raise
                raise request.sampling.structured_outputs.refused(str(error)) from error

    async def carry_out(self, job: Job) -> Result:
        """Have a job done; it travels in the trace headers of a request of its own."""
        return await carry_out(job, self._settings, self._result)

    async def _result(self, request: VLLMRequest) -> Result | None:
        """Send a request, and return the connector's result."""
        params: Mapping[str, Any] | None = None
        async for piece in self.send(request, stream=False):
            params = piece.params or params
        return result_of(params)

    def _parameters(self, request: VLLMRequest) -> Any:
        """Return vLLM's SamplingParams of a request; its job is carried from here on."""
        current_job.set(request.job)  # for the task that sends this request
        return vllm_sampling(request)

    async def _stop(self) -> None:
        self.vllm.shutdown()
        del self.vllm  # it cleans up after itself, which fails once the interpreter shuts down


class OwnClient(InProcessVLLM):
    """Sends requests to the vLLM of the server that this process is; closing it ends nothing else.

    Make it in the server's event loop.
    """

    def __init__(self, client: Any, model: str, namespace: str | None) -> None:
        """Use a server's engine client.

        Args:
            client: vLLM's EngineClient, as endpoint plugins and ``app.state`` have it.
            model: the name or the folder that vLLM was started with.
            namespace: of all requests from here, where keys decide it; else None.
        """
        Transport.__init__(self)
        self.vllm, self._model, self.model_name = client, model, public_name(model)
        self._namespace = namespace
        self.background = GivenLoop()
        self.context_window = int(client.model_config.max_model_len)
        self._settings = ConnectorSettings.of_vllm(client.vllm_config)
        carry(client)

    def _parameters(self, request: VLLMRequest) -> Any:
        current.set(self._namespace)  # for the task that sends this request
        return super()._parameters(request)

    async def _stop(self) -> None:
        """Leave the server as it is."""


def _piece(step: Any, most: int | None) -> Piece:
    """most: how many likely tokens are asked for beside each token."""
    out = step.outputs[0]
    told = zip(out.token_ids, out.logprobs or (), strict=True) if most is not None else ()
    return Piece(
        out.text,
        tuple(out.token_ids),
        out.finish_reason,
        out.stop_reason,
        step.kv_transfer_params,
        logprobs=tuple(
            RawLogprob.of(token, {each: one.logprob for each, one in likely.items()}, most or 0)
            for token, likely in told
        ),
    )


def vllm_sampling(request: VLLMRequest) -> Any:
    """Return vLLM's own SamplingParams of a request."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    asked = request.sampling
    plain = dict(asked)
    plain["stop"] = list(asked.stop)
    plain["top_k"] = asked.top_k or -1
    form = asked.structured_outputs
    plain["structured_outputs"] = form and StructuredOutputsParams(**form.to_vllm())
    return VLLMSamplingParams(
        **plain,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": request.wish.to_params()},
    )


BY_ONE = frozenset({"compare", "status"})
"""Kinds that any replica does for all."""
BY_ONE_IF_SHARED = frozenset({"precompute", "lookup"})
"""Kinds that one does for all if they keep chunk KV in one place."""

Send = Callable[[VLLMRequest], Awaitable[Result | None]]
"""Sends a request, and returns the connector's result."""


async def carry_out(job: Job, settings: ConnectorSettings, send: Send) -> Result:
    """Have a job done by each replica that must do it.

    Args:
        job: what is to be done.
        settings: of the connector.
        send: sends a request to vLLM.

    Returns:
        One result of all: the first failure; stored is what all have, evicted what any had.
    """
    by_one = job.kind in BY_ONE or (job.kind in BY_ONE_IF_SHARED and settings.store.outlives)
    replicas = [None] if by_one or settings.replicas == 1 else range(settings.replicas)
    tasks = [asyncio.ensure_future(send(carrier(job, replica))) for replica in replicas]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if job.kind == "report":
        return next((one for one in results if one not in (None, NO_REPORT)), NO_REPORT)
    return reduce(joined, (one or Failed(NO_CONNECTOR) for one in results))


def carrier(job: Job, replica: int | None = None) -> VLLMRequest:
    """Return a request that carries a job to the connector; its prompt is any two tokens."""
    return VLLMRequest(
        (0, 0),
        ResolvedSampling(max_tokens=2, ignore_eos=True),
        f"{SALT_PREFIX}{uuid.uuid4().hex}",
        replica=replica,
        job=job.model_dump_json(),
    )
