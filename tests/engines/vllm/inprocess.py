"""An engine whose vLLM runs in this process: it starts in seconds and its scheduler can be seen."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.model_files import vllm_generation_values
from cacheblend_rag.engines.stream import BackgroundLoop
from cacheblend_rag.engines.vllm.connector.finding import Finding
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import carry_out, vllm_sampling
from cacheblend_rag.engines.vllm.namespaces import JOB_FIELD
from cacheblend_rag.engines.vllm.protocol.job import Job
from cacheblend_rag.engines.vllm.protocol.result import Result, result_of
from cacheblend_rag.engines.vllm.transport import Piece, Transport, VLLMRequest
from tests.models import make_tokenizer

IDLE_STEPS = 200


class LockstepVLLM(Transport):
    """vLLM's synchronous engine; requests advance together, step by step.

    settings: of the connector. options: further arguments of vLLM's EngineArgs.
    vLLM's process-wide state serves one at a time: shut one down before starting another.
    """

    name = address = "vllm"
    running: ClassVar[LockstepVLLM | None] = None
    """The one in this process."""
    shared_as = ""
    """The name that tests share it under; it then outlives their engines."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__()
        LockstepVLLM.end_shared()
        assert LockstepVLLM.running is None, "another vLLM runs in this process"
        LockstepVLLM.running = self
        transfer = KVTransferConfig(**ConnectorSettings().to_transfer_config())
        transfer.kv_connector_extra_config.update(settings or {})
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
        self.background = BackgroundLoop("in-process")
        self.model_name = folder.name
        self.context_window = int(self.core.model_config.max_model_len)

    @classmethod
    def shared(cls, name: str, start: Callable[[], Self]) -> Self:
        """Return the one that tests share under this name, started unless it runs already."""
        running = cls.running
        if running is None or running.shared_as != name:
            running = start()
            running.shared_as = name
        assert isinstance(running, cls)
        return running

    @classmethod
    def end_shared(cls) -> None:
        """Make room for another vLLM, or for processes that are forked from this one."""
        if cls.running is not None and cls.running.shared_as:
            cls.running.shut_down()

    def load_tokenizer(self) -> Any:
        return make_tokenizer()

    def generation_values(self) -> Mapping[str, Any]:
        return vllm_generation_values(self.core.model_config)

    def step(self) -> None:
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
        headers = {**request.headers, **({JOB_FIELD: request.job} if request.job else {})} or None
        self.core.add_request(name, prompt, sampling, trace_headers=headers)
        done = False
        try:
            await asyncio.sleep(0)  # others that are sent now take part in the first step
            while not done:
                while not arrived:
                    self.step()
                    await asyncio.sleep(0)
                done = arrived[0].finished
                yield arrived.popleft()
        finally:
            del self._arrived[name]
            if not done:
                self.core.abort_request([name])

    async def carry_out(self, job: Job) -> Result:
        settings = ConnectorSettings.of_vllm(self.core.vllm_config)
        return await carry_out(job, settings, self._result)

    async def _result(self, request: VLLMRequest) -> Result | None:
        params: Mapping[str, Any] | None = None
        async for piece in self.send(request, stream=False):
            params = piece.params or params
        return result_of(params)

    async def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        outputs = self.outputs(request, vllm_sampling(request), request.request_id)
        async with aclosing(outputs) as steps:
            async for step in steps:
                out = step.outputs[0]
                params = step.kv_transfer_params
                yield Piece(out.text, tuple(out.token_ids), out.finish_reason, params=params)

    def close(self) -> None:
        if not self.shared_as:
            self.shut_down()

    def shut_down(self) -> None:
        """End vLLM, in the thread that started it."""
        super().close()
        self.core.engine_core.shutdown()
        del self.core
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        LockstepVLLM.running = None

    async def _stop(self) -> None:
        """The core is shut down elsewhere; see ``shut_down``."""


class InProcessEngine(VLLMEngine):
    """As VLLMEngine, over vLLM's synchronous engine."""

    def __init__(self, vllm: LockstepVLLM, config: BlendConfig, **options: Any) -> None:
        self.vllm = vllm
        super().__init__(vllm, config=config, **options)

    @classmethod
    def open(
        cls,
        folder: Path,
        config: BlendConfig,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Open an engine over a vLLM of its own, which closes with it."""
        return cls(LockstepVLLM(folder, settings, **options), config)

    @property
    def core(self) -> Any:
        return self.vllm.core

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

        async def step_once() -> None:
            self.vllm.step()

        for _ in range(IDLE_STEPS):
            if not self.scheduler.has_requests() and not self.core.has_unfinished_requests():
                break
            self.vllm.run(step_once())
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def begin_anew(self) -> None:
        """Keep nothing of what was stored and computed so far; a new start would take seconds."""
        store = self.worker_connector.blender.store
        for key in list(store.entries()):
            store.evict(key)
        self.free_blocks()
        assert self.core.reset_prefix_cache()
        config, connector = self.core.vllm_config, self.scheduler_connector
        connector.finding.finder.close()
        connector.finding = Finding.of(config, ConnectorSettings.of_vllm(config))
