"""vLLM takes the names that the embedded engine takes, and shares its chunk KV under them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Document,
    SamplingParams,
    StoreConfig,
    TieredKVStore,
    TransformersEngine,
)
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from tests.engines.vllm.opening import vllm_in_process

FACTS = Document(
    "facts",
    (
        "Ivan Novak was born in Zagreb in 1961 and moved to Ljubljana when he was seven. ",
        "Ana Kovac is a painter from Split who has lived in Vienna since the year 2004. ",
    ),
)
CONFIG = BlendConfig(min_tokens=0, recompute_ratio=1.0)
SHORT = SamplingParams(max_tokens=8)


def question() -> BlendPrompt:
    first, second = FACTS.to_chunks()
    return BlendPrompt.of(second, first, "Ivan Novak was born in the city of")


def test_smollm2_by_name_shares_chunks_with_the_embedded_engine(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    store = TieredKVStore.open(host_bytes=0, kv_path=tmp_path)
    embedded = TransformersEngine("smollm2", dtype="float32", config=CONFIG, store=store)
    with closing(embedded):
        assert embedded.precompute([FACTS], progress=False).computed == 2
        here = embedded.generate(question(), SHORT)
    vllm = vllm_in_process(
        "smollm2",
        settings=ConnectorSettings(store=StoreConfig(kv_path=tmp_path)),
        config=CONFIG,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
    )
    with closing(vllm):
        assert vllm.model_name == "smollm2"
        assert vllm.precompute([FACTS], progress=False).skipped == 2
        there = vllm.generate(question(), SHORT)
    assert there.token_ids == here.token_ids
    assert [chunk.hit for chunk in there.report.chunks] == [True, True]
