"""An engine over a vLLM of its own: the contract of engines, and beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheblend_rag import (
    BlendPrompt,
    Generation,
    TransformersEngine,
)
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import InProcessVLLM
from cacheblend_rag.engines.vllm.versions import memory_share
from tests.engines import contract
from tests.engines.vllm.opening import vllm_in_process
from tests.engines.vllm.test_exactness import DOCUMENTS, SHORT
from tests.models import make_tokenizer, words

CONFIG = contract.CONFIG.with_changes(cost_model=False)
"""In a server's process nothing keeps noise from deciding, once it has timed enough prompts."""
WINDOW = 2048


@pytest.fixture(scope="module")
def in_process(model_folder: Callable[[str], Path]) -> Iterator[VLLMEngine]:
    engine = vllm_in_process(
        model_folder("llama"),
        config=contract.CONFIG,
        dtype="float32",
        enforce_eager=True,
        max_model_len=WINDOW,
    )
    yield engine
    if engine.is_open:
        engine.close()


# Beyond the contract


@pytest.fixture
def filled(in_process: VLLMEngine) -> VLLMEngine:
    in_process.precompute(DOCUMENTS, progress=False)
    return in_process


def same_tokens(answers: list[Generation], others: list[Generation]) -> bool:
    return [a.token_ids for a in answers] == [b.token_ids for b in others]


def test_of_chunks_with_other_tokens_at_their_edges_the_rest_is_reused(
    filled: VLLMEngine, model_folder: Callable[[str], Path]
) -> None:
    """A word that touches a passage changes its first or last token."""
    filled.precompute(DOCUMENTS, progress=False)
    embedded = TransformersEngine(
        model_folder("llama"), tokenizer=make_tokenizer(), config=CONFIG, dtype="float32"
    )
    embedded.precompute(DOCUMENTS, progress=False)
    first, second = (document.to_chunks()[0] for document in DOCUMENTS)
    prompt = BlendPrompt.of(words(9, 61), first, f"{words(7, 62)} ", second, words(23, 63))
    whole = tuple(make_tokenizer().encode(prompt.text, add_special_tokens=False))
    for ratio in (0.0, 0.3, 1.0):
        config = CONFIG.with_changes(recompute_ratio=ratio)
        here = filled.generate(prompt, SHORT, config=config)
        there = embedded.generate(prompt, SHORT, config=config)
        assert here.token_ids == there.token_ids
        assert [(c.hit, c.edge_tokens) for c in here.report.chunks] == [(True, 2), (True, 1)]
        assert here.report.reused_tokens == there.report.reused_tokens
        assert here.report.prompt_tokens == len(whole)
    assert filled.generate_full(prompt, SHORT).token_ids == here.token_ids


def test_vllm_in_process_leaves_memory_to_others(in_process: VLLMEngine) -> None:
    assert isinstance(in_process.transport, InProcessVLLM)
    config = in_process.transport.vllm.vllm_config
    assert config.cache_config.gpu_memory_utilization == memory_share()


class TestInProcess(contract.EngineContract):
    """Last of all: its own last test ends the vLLM."""

    tells_what_it_stores = False

    @pytest.fixture
    def engine(self, in_process: VLLMEngine) -> VLLMEngine:
        return in_process

    def at_work(self, engine: VLLMEngine) -> int:
        assert isinstance(engine.transport, InProcessVLLM)
        return int(engine.transport.vllm.output_processor.get_num_unfinished_requests())
