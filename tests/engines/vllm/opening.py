"""Engines over both transports, and what an engine sends for a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, Generation, SamplingParams
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.vllm.connection import VLLMServer
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.transport import VLLMRequest

OF_SERVER = ("model", "api_key", "timeout_seconds", "max_retries")
OF_ENGINE = ("tokenizer", "config", "registry", "instruction", "namespace", "lead_in")


def vllm_server(url: str, **arguments: Any) -> VLLMEngine:
    """An engine on a server; arguments: of VLLMServer and of VLLMEngine."""
    own = {name: arguments.pop(name) for name in OF_SERVER if name in arguments}
    return VLLMEngine(VLLMServer(url, **own), **arguments)


def vllm_in_process(model: str | Path, **arguments: Any) -> VLLMEngine:
    """An engine over a vLLM of its own; arguments: of InProcessVLLM and of VLLMEngine."""
    from cacheblend_rag.engines.vllm.in_process import InProcessVLLM
    from tests.engines.vllm.inprocess import LockstepVLLM

    LockstepVLLM.end_shared()  # its processes are forked from this one
    own = {name: arguments.pop(name) for name in OF_ENGINE if name in arguments}
    return VLLMEngine(InProcessVLLM(model, **arguments), **own)


def request_of(
    engine: VLLMEngine,
    prompt: PromptLike,
    sampling: SamplingParams | None,
    config: BlendConfig | None,
    *,
    full: bool = False,
) -> VLLMRequest:
    """What an engine sends to vLLM for a prompt."""
    return engine._sent(engine._request(prompt, sampling, config, full=full))


def share_cores(environment: pytest.MonkeyPatch) -> None:
    """Let several processes of one vLLM run on the same cores."""
    environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setenv("OMP_NUM_THREADS", "1")


def same_tokens(answers: list[Generation], others: list[Generation]) -> bool:
    return [a.token_ids for a in answers] == [b.token_ids for b in others]
