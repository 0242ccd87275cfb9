"""Query engines: instructions taken from templates, sentence windows, several indexes, hints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, PromptTemplate, Settings
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from toy import TOY
from transformers import AutoTokenizer

from cacheblend_rag import Chunk
from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    cacheblend_query_engine,
    collect_reports,
)
from llama_index.llms.cacheblend.context import expect, hints_in
from llama_index.llms.cacheblend.indexing import has_window

SPLITTER = [SentenceSplitter(chunk_size=40, chunk_overlap=0)]
HEAD = "Context information is below.\n---------------------\n"
ONE = "The first passage tells of Clara Berg, who lives in Paris and plays the cello every day."
TWO = "The second passage tells of Oscar Lund, who works as a baker and was born in Oslo in 1950."


@pytest.fixture
def llm(toy_llm: CacheBlendLLM) -> CacheBlendLLM:
    return toy_llm


def documents() -> list[Document]:
    return [
        Document(
            text=" ".join(f"{word} number {n} is heavy." for n in range(9)),
            id_=word,
            metadata={"file": f"{word}.txt"},
        )
        for word in ("Stone", "Brick")
    ]


def all_hit(query_engine: Any) -> bool:
    with collect_reports() as reports:
        query_engine.query("What is heavy?")
    return bool(reports[0]["chunks"]) and all(chunk["hit"] for chunk in reports[0]["chunks"])


@pytest.mark.parametrize(
    ("given", "instruction"),
    [
        ({}, HEAD),
        (
            {"response_mode": ResponseMode.TREE_SUMMARIZE},
            HEAD.replace("information", "information from multiple sources"),
        ),
        ({"text_qa_template": PromptTemplate("Read {context_str}: {query_str}")}, "Read "),
    ],
)
def test_the_instruction_is_the_head_of_the_template(
    given: dict[str, Any], instruction: str, llm: CacheBlendLLM
) -> None:
    Settings.llm = llm
    query_engine = cacheblend_query_engine(documents(), show_progress=False, **given)
    assert llm.instruction == instruction
    assert all_hit(query_engine)


def test_the_instruction_is_rendered_as_the_model_reads_it(tmp_path: Path) -> None:
    llm = CacheBlendLLM(model=TOY, is_chat_model=False, system_prompt="Be brief.")
    assert llm.resolve_instruction() == f"Be brief.\n\n{HEAD}"
    assert llm.resolve_instruction(PromptTemplate("No place: {query_str}")) == ""
    instruction = CacheBlendLLM(model=TOY).resolve_instruction()
    assert instruction.startswith("<bos>You are an expert Q&A system")
    assert instruction.endswith(HEAD)
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    tokenizer.chat_template = (
        "{{ raise_exception('no') if messages[0].role == 'system' }}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    instruction = CacheBlendLLM(model=tmp_path).resolve_instruction()
    assert instruction.startswith("<user>You are an expert Q&A system")
    assert f"\n\n{HEAD}" in instruction


def test_a_missing_embedding_model_is_missed_before_anything_is_loaded(
    llm: CacheBlendLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_embed_model", None)
    monkeypatch.delenv("IS_TESTING", raising=False)
    with pytest.raises((ImportError, ValueError), match=r"(?i)openai"):
        cacheblend_query_engine(documents(), llm)
    assert not llm.is_open


def test_two_indexes_over_the_same_documents_keep_their_chunks(llm: CacheBlendLLM) -> None:
    fine = [SentenceSplitter(chunk_size=20, chunk_overlap=0)]
    first, second, again = (
        cacheblend_query_engine(documents(), llm, transformations=steps, show_progress=False)
        for steps in (SPLITTER, fine, SPLITTER)
    )
    assert all_hit(first)
    assert all_hit(second)
    chunks = llm.open().registry.document("Stone")
    assert len({chunk.collection for chunk in chunks}) == 2  # the third is the first one's
    again.retriever._index.delete_ref_doc("Stone")
    assert len({chunk.collection for chunk in llm.open().registry.document("Stone")}) == 1
    assert all_hit(second)


def test_every_sentence_of_a_window_is_reused(llm: CacheBlendLLM) -> None:
    parser = SentenceWindowNodeParser.from_defaults(
        sentence_splitter=lambda text: [f"{part}." for part in text.split(".") if part.strip()],
        window_size=2,
        window_metadata_key="around",
    )
    query_engine = cacheblend_query_engine(
        documents(),
        llm,
        transformations=[parser],
        node_postprocessors=[MetadataReplacementPostProcessor("around")],
        similarity_top_k=2,
        show_progress=False,
    )
    with collect_reports() as reports:
        query_engine.query("What is heavy?")
    (report,) = reports
    # A window at a document's edge has fewer sentences; no report names a chunk not in the prompt.
    assert len(report["chunks"]) >= 2 * 3
    assert all(chunk["hit"] for chunk in report["chunks"])
    hidden = {"source": "a file about stones", "text": "A stone.", "number": 3}
    excluded = list(hidden)
    node = TextNode(text="A stone.", metadata=hidden, excluded_llm_metadata_keys=excluded)
    assert not has_window(node)


def test_nodes_that_stand_in_the_prompt_are_hinted_whole_or_cut() -> None:
    shown = [
        (Chunk(f"page: {n}\n\n{text}", "d"), Chunk(text, "d")) for n, text in enumerate((ONE, TWO))
    ]
    overlap = (Chunk(f"{ONE[-60:]} {TWO}", "d"),)
    for hints, prompt, expected in (
        (shown, f"Read:\npage: 0\n\n{ONE}\n\nQuestion", [shown[0][0]]),
        (shown, f"Source 1:\n{TWO}\n", [shown[1][1]]),
        (shown, "A prompt of another call.", []),
        (shown, f"{ONE}\n\n{TWO[:60]}", [shown[0][1], shown[1][0]]),  # the report names what is cut
        ([shown[0], overlap], f"Read:\n{ONE}\n\nQuestion", [shown[0][1]]),
    ):
        expect(hints)
        assert hints_in(prompt) == expected
    expect(())
