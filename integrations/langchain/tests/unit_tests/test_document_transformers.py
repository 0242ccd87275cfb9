"""Passages that are only made known, and computed once they are missed."""

from __future__ import annotations

import time
from pathlib import Path

from langchain_core.documents import Document
from toy import TOY

from langchain_cacheblend import CacheBlendTransformer, ChatCacheBlend
from tests.cache_keys import cache_key

TEXTS = [" ".join(f"Sentence {n} of part {part}." for n in range(9)) for part in range(3)]


def test_what_is_only_registered_is_filled_once_it_is_missed(tmp_path: Path) -> None:
    settings = {"model": TOY, "kv_path": tmp_path, "blend_config": {"min_tokens": 0}}
    documents = [Document(page_content=text, metadata={"source": "a"}) for text in TEXTS]
    step = CacheBlendTransformer(**settings, register_only=True)
    report = step.precompute(documents)
    assert (report.registered, report.computed) == (3, 0)
    assert step.transform_documents(documents) == documents
    step.engine.close()
    llm = ChatCacheBlend(**settings, fill_on_miss=True, max_tokens=2)
    prompt = "\n\n".join(TEXTS) + "\n\nWhat?"
    told = [chunk.reason for chunk in llm.engine.generate(prompt).report.chunks]
    assert told == ["not stored, being filled"] * 3
    deadline = time.monotonic() + 60
    while llm.engine.fill_report().waiting and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [chunk.hit for chunk in llm.engine.generate(prompt).report.chunks] == [True] * 3
    llm.engine.close()


def test_filling_changes_no_key_of_an_answer() -> None:
    plain, filling = (ChatCacheBlend(model=TOY, fill_on_miss=fill) for fill in (False, True))
    assert plain.engine_identity == filling.engine_identity
    assert cache_key(plain) == cache_key(filling)
