"""vLLMs in this process that tests share: each starts once, unless another runs in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from cacheblend_rag import BlendConfig
from tests.engines.vllm.inprocess import InProcessEngine, LockstepVLLM

KERNEL_BLOCK = 32
STEP_TOKENS = 300
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "few_blocks": {"max_model_len": 1024, "num_gpu_blocks_override": 15, "max_num_seqs": 8},
    # vLLM hands out blocks of 128 tokens, and its kernels see blocks of 32
    "short_steps": {"max_num_batched_tokens": STEP_TOKENS, "block_size": 128},
}


@contextmanager
def shared_engine(name: str, folder: Path, config: BlendConfig) -> Iterator[InProcessEngine]:
    """An engine over the vLLM of that name in OPTIONS, emptied; vLLM outlives it."""
    with closing(
        InProcessEngine(LockstepVLLM.shared(name, lambda: _start(name, folder)), config)
    ) as engine:
        engine.begin_anew()
        yield engine


def _start(name: str, folder: Path) -> LockstepVLLM:
    if name != "short_steps":
        return LockstepVLLM(folder, **OPTIONS[name])
    with patch.object(
        CPUAttentionBackend, "get_supported_kernel_block_sizes", lambda *_: [KERNEL_BLOCK]
    ):
        return LockstepVLLM(folder, **OPTIONS[name])
