"""Ingestion pipelines: caches, and workers."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Document
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from toy import TOY

from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute

SPLITTER = SentenceSplitter(chunk_size=60, chunk_overlap=0)
DOCUMENTS = [
    Document(text=" ".join(f"Stone {n} of heap {heap} is heavy." for n in range(12)), id_=f"{heap}")
    for heap in range(4)
]


def settings(model: Path, kv_path: Path) -> dict[str, Any]:
    reuse = {"instruction": "Notes:\n", "blend_config": {"min_tokens": 0}}
    return {"model": model, "kv_path": kv_path, **reuse}


def pipeline(model: Path, kv_path: Path, cache: IngestionCache | None = None) -> IngestionPipeline:
    precompute = CacheBlendPrecompute(**settings(model, kv_path), show_progress=False)
    return IngestionPipeline(transformations=[SPLITTER, precompute], cache=cache)


def outcomes(model: Path, kv_path: Path, nodes: list[BaseNode]) -> list[tuple[bool, str | None]]:
    """Ask about all nodes; tell of each chunk found whether its KV was reused, and why not."""
    llm = CacheBlendLLM(**settings(model, kv_path), max_tokens=1)
    prompt = "Notes:\n" + "\n\n".join(node.get_content() for node in nodes) + "\n\nWhat is heavy?"
    report = llm.complete(prompt, formatted=True).additional_kwargs["cacheblend"]
    return [(chunk["hit"], chunk["reason"]) for chunk in report["chunks"]]


def test_a_cached_run_over_wiped_kv_costs_time_and_no_answer(tmp_path: Path) -> None:
    cache = IngestionCache()
    for _ in range(2):
        nodes = list(pipeline(TOY, tmp_path, cache).run(documents=DOCUMENTS))
    assert outcomes(TOY, tmp_path, nodes) == [(True, None)] * len(nodes)
    for entry in tmp_path.iterdir():  # KV, but not what is known of chunks
        if "sqlite" not in entry.name:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    again = pipeline(TOY, tmp_path, cache)
    nodes = list(again.run(documents=DOCUMENTS))
    assert outcomes(TOY, tmp_path, nodes) == [(False, "not stored")] * len(nodes)
    again.transformations[-1](nodes)
    assert outcomes(TOY, tmp_path, nodes) == [(True, None)] * len(nodes)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["run", "arun"])
def test_workers_share_one_folder(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Workers read the splitter's tokenizer anew: from LlamaIndex's copy, not from the network.
    tokenizers = Path(llama_index.core.__file__).parent / "_static" / "tiktoken_cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tokenizers))
    working = pipeline(TOY, tmp_path)
    if asynchronous:
        nodes = asyncio.run(working.arun(documents=DOCUMENTS, num_workers=2))
    else:
        nodes = working.run(documents=DOCUMENTS, num_workers=2)
    assert not working.transformations[-1].is_open
    assert outcomes(TOY, tmp_path, list(nodes)) == [(True, None)] * len(nodes)
