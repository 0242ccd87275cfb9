"""An engine whose vLLM runs in this process: it starts in seconds and its scheduler can be seen."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.background import BackgroundLoop
from cacheblend_rag.engines.vllm.client import Piece, VLLMClient, VLLMRequest
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import _sampling
from tests.models import make_tokenizer

IDLE_STEPS = 200


class InProcessEngine(VLLMClient):
    """As VLLMEngine, over vLLM's synchronous engine; requests advance together, step by step.

    vLLM's process-wide state serves one at a time: close one before opening another.
    settings: of the connector. options: further arguments of vLLM's EngineArgs.
    """

    is_in_use = False

    def __init__(
        self,
        folder: Path,
        config: BlendConfig,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        transfer = KVTransferConfig(**ConnectorSettings().to_transfer_config())
        transfer.kv_connector_extra_config.update(settings or {})
        assert not InProcessEngine.is_in_use, "another engine is open in this process"
        InProcessEngine.is_in_use = True
        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
        arguments = EngineArgs(
            model=str(folder), kv_transfer_config=transfer, **{**defaults, **options}
        )
        self.core = LLMEngine(
            arguments.create_engine_config(),
            executor_class=UniProcExecutor,
            log_stats=True,
            multiprocess_mode=False,
        )
        self._arrived: dict[str, deque[Any]] = {}
        super().__init__(
            folder.name,
            make_tokenizer(),
            config=config,
            registry=None,
            instruction="",
            namespace="default",
            lead_in=None,
            background=BackgroundLoop("in-process"),
        )

    @property
    def context_window(self) -> int:
        return int(self.core.model_config.max_model_len)

    @property
    def scheduler(self) -> Any:
        return self.core.engine_core.engine_core.scheduler

    @property
    def worker_connector(self) -> Any:
        """The connector's side in the worker."""
        return get_kv_transfer_group().worker

    @property
    def scheduler_connector(self) -> Any:
        """The connector's side beside the scheduler."""
        return self.scheduler.connector.scheduler

    def state_of(self, name: str) -> Any:
        """The scheduler's view of a request, None before and after it has one."""
        states = self.scheduler.requests.items()
        return next((state for found, state in states if found.startswith(name)), None)

    def free_blocks(self) -> int:
        """Blocks nobody holds, once vLLM has nothing left to do."""
        for _ in range(IDLE_STEPS):
            if not self.scheduler.has_requests() and not self.core.has_unfinished_requests():
                break
            self._background.run(self._step_once())
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    async def _step_once(self) -> None:
        self._step()

    def _step(self) -> None:
        for output in self.core.step():
            if output.request_id in self._arrived:
                self._arrived[output.request_id].append(output)

    async def outputs(
        self, request: VLLMRequest, sampling: Any, name: str = ""
    ) -> AsyncGenerator[Any]:
        """Yield vLLM's own outputs of a request; closing the iterator aborts it."""
        name, arrived = name or uuid.uuid4().hex, deque[Any]()
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": request.salt}
        self._arrived[name] = arrived
        self.core.add_request(name, prompt, sampling)
        done = False
        try:
            await asyncio.sleep(0)  # others that are sent now take part in the first step
            while not done:
                while not arrived:
                    self._step()
                    await asyncio.sleep(0)
                done = arrived[0].finished
                yield arrived.popleft()
        finally:
            del self._arrived[name]
            if not done:
                self.core.abort_request([name])

    async def _send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        async with aclosing(self.outputs(request, _sampling(request))) as steps:
            async for step in steps:
                out = step.outputs[0]
                params = step.kv_transfer_params
                yield Piece(out.text, tuple(out.token_ids), out.finish_reason, params=params)

    def close(self) -> None:
        super().close()
        self.core.engine_core.shutdown()
        del self.core
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        InProcessEngine.is_in_use = False
