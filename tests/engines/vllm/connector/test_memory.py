"""What a pass holds at most inside a running vLLM, at 4k and 16k tokens of chunk KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend_rag import BlendConfig, BlendReport, Chunk, SamplingParams
from cacheblend_rag.blend import FusedKV, RingKV
from cacheblend_rag.engines.vllm.connector.stack import WRITTEN_AT_ONCE
from tests.engines.vllm.inprocess import InProcessEngine
from tests.memory import PeakBytes
from tests.models import SHAPE, make_tokenizer, prompt_of, words

DEPTH, CHUNK, MOST, HIDDEN, HEAD = 16, 512, 32, 256, 64
FLOAT = 4
TOKEN_KV = 2 * SHAPE["num_key_value_heads"] * HEAD * FLOAT
"""Of one token in one layer."""
ROW_BYTES = 2 * HIDDEN * FLOAT
"""Of one row that is carried: its hidden state and residual."""
CHECKED_BYTES = 3 * TOKEN_KV + TOKEN_KV // 2
"""Of one row where rows are chosen by their KV: fresh, what is compared of both, the difference."""
TOKEN_BYTES = 128
"""Of one token on the host: its id, its slots, what is known of it, and its bounds in an index."""
CONSTANT = 2 << 20
CHUNKS = [Chunk(words(CHUNK, seed)) for seed in range(MOST)]
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessEngine]:
    """Over a model so deep that its KV is far more than two layers'; its chunks are stored."""
    folder = tmp_path_factory.mktemp("deep")
    shape = {**SHAPE, "num_hidden_layers": DEPTH, "max_position_embeddings": 2 * MOST * CHUNK}
    config = LlamaConfig(**{**shape, "hidden_size": HIDDEN}, head_dim=HEAD)
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    of_requests = BlendConfig(min_tokens=0, recompute_ratio=0.05)
    engine = InProcessEngine.open(folder, of_requests, max_model_len=MOST * CHUNK + 256)
    assert engine.precompute(CHUNKS, progress=False).computed == MOST
    yield engine
    engine.close()


def blended(engine: InProcessEngine, tokens: int, selector: str) -> tuple[BlendReport, int]:
    """Answer over so many tokens of chunks; the report, and the most bytes that the pass held."""
    jobs, memory = engine.worker_connector.blender.jobs, PeakBytes()
    work = jobs.work

    def watched(*given: Any) -> Any:
        steps = work(*given)
        while True:
            try:
                with memory:
                    next(steps)
            except StopIteration as ended:
                return ended.value
            yield

    prompt = prompt_of(words(7, tokens), *CHUNKS[: tokens // CHUNK], words(9, len(selector)))
    config = engine.config.with_changes(selector=selector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "work", watched)
        return engine.generate(prompt, ONE, config=config).report, memory.peak


@pytest.mark.parametrize(
    ("tokens", "selector"), [(4096, "chunk_head"), (4096, "hkvd"), (16384, "question_mid")]
)
def test_a_pass_in_vllm_holds_two_layers(
    engine: InProcessEngine, tokens: int, selector: str
) -> None:
    stack = engine.worker_connector.blender.stack
    report, peak = blended(engine, tokens, selector)
    assert [chunk.hit for chunk in report.chunks] == [True] * (tokens // CHUNK)
    assert report.recomputed_tokens == pytest.approx(0.05 * tokens, abs=1)
    whole, checks = tokens + 16, selector == "hkvd"
    rows = whole if checks else whole // 16
    of_rows = rows * (ROW_BYTES + checks * CHECKED_BYTES) + whole * TOKEN_BYTES
    ring, copied = RingKV.bytes_for(stack.geometry, whole), WRITTEN_AT_ONCE * TOKEN_KV
    assert 2 * tokens * TOKEN_KV < peak <= ring + of_rows + copied + CONSTANT
    assert peak <= stack.pass_bytes(whole, checks=checks), "what a GPU must have free"
    assert peak < FusedKV.bytes_for(stack.geometry, tokens)
