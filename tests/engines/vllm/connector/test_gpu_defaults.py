"""With vLLM's defaults on a GPU: see forking.py."""

from __future__ import annotations

import pytest

from cacheblend_rag.engines.vllm.transport import VLLMRequest
from tests.engines.vllm.exactness import SHORT, check_exact, index, logprobs
from tests.engines.vllm.forking import GPU_DEFAULTS
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import retrieved


@pytest.mark.skipif(not GPU_DEFAULTS, reason="set TRITON_INTERPRET=1")
def test_a_blend_is_exact_and_what_is_not_blended_is_computed_by_vllm(
    llama: InProcessEngine,
) -> None:
    config = llama.core.vllm_config
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling
    index(llama)
    check_exact(llama)
    unblended = llama.config.with_changes(min_tokens=10_000)
    asked = request_of(llama, retrieved(seed=31), SHORT, unblended)
    assert logprobs(llama, asked) == logprobs(llama, VLLMRequest(asked.token_ids, SHORT, "plain"))
