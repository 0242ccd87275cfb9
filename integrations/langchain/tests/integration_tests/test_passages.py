"""All passages of a question-answering dataset are indexed; every one retrieved is reused.

CACHEBLEND_MUSIQUE names a larger file of the same form than the sample in tests/data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda

from langchain_cacheblend import (
    DEFAULT_PROMPT,
    CacheBlendTransformer,
    ChatCacheBlend,
    create_cacheblend_chain,
)
from langchain_cacheblend.instruction import prompt_instruction
from tests.models import make_tokenizer, random_engine

SAMPLE = Path(__file__).parents[1] / "data" / "musique_sample.json"
DATASET = Path(os.environ.get("CACHEBLEND_MUSIQUE", SAMPLE))
SEPARATOR = "\n\n"


def read_questions() -> list[tuple[str, list[Document]]]:
    return [
        (
            item["question"],
            [
                Document(
                    page_content="\n".join(filter(None, (ctx["title"], ctx["text"]))),
                    metadata={"source": f"{number}-{place}"},
                )
                for place, ctx in enumerate(item["ctxs"])
            ],
        )
        for number, item in enumerate(json.loads(DATASET.read_text(encoding="utf-8")))
    ]


def expected_places(llm: ChatCacheBlend, documents: list[Document]) -> list[tuple[Any, ...]]:
    """Document, first token and length of each passage of the prompt."""
    instruction = make_tokenizer().encode(llm.engine.instruction, add_special_tokens=False)
    start, places = len(instruction), []
    for document in documents:
        tokens = llm.get_num_tokens(document.page_content)
        places.append((document.metadata["source"], start, tokens))
        start += tokens + llm.get_num_tokens(SEPARATOR)
    return places


def test_every_retrieved_passage_is_found_and_reused() -> None:
    engine = random_engine(
        instruction=prompt_instruction(DEFAULT_PROMPT, make_tokenizer()), recompute_ratio=0.0
    )
    llm = ChatCacheBlend(engine=engine, max_tokens=1)
    questions = read_questions()
    passages = [passage for _, retrieved in questions for passage in retrieved]
    report = CacheBlendTransformer(engine=engine).precompute(passages)
    assert report.computed + report.skipped == len(passages)

    retriever = RunnableLambda(dict(questions).__getitem__)
    chain = create_cacheblend_chain(retriever, llm)
    found = missed = misplaced = tokens = reused = 0
    for question, retrieved in questions:
        outcome = chain.invoke(question)
        chunks = outcome["report"]["chunks"]
        found += sum(chunk["hit"] for chunk in chunks)
        missed += sum(not chunk["hit"] for chunk in chunks)
        expected = expected_places(llm, retrieved)
        places = [(c["document_id"], c["start"], c["tokens"]) for c in chunks]
        misplaced += sum(place not in expected for place in places)
        assert places == expected
        tokens += sum(length for *_, length in expected)
        reused += outcome["report"]["reused_tokens"]
    print(
        f"\n{len(questions)} questions, {len(passages)} passages: {found} found and reused, "
        f"{missed} missed, {misplaced} misplaced; {reused} of {tokens} tokens reused"
    )
    assert (found, missed, misplaced) == (len(passages), 0, 0)
    assert reused == tokens
