"""Passages that programs send re-encoded are found again, and reused."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cacheblend_rag import BlendConfig, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.catalog import ComputedRun
from cacheblend_rag.engines.finder import Finder
from cacheblend_rag.engines.found_chunk import FoundChunk, Vocabulary
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.lead_in import LeadInId
from cacheblend_rag.text.reencoded import MOST_COMPARED
from tests.models import make_model

SHARE = 0.85
LINE = 120
"""Characters of a line: about 27 tokens."""
QUESTION = "\n\nQuestion: What is said there?\nAnswer:"
FORMS: dict[str, Callable[[Sequence[str]], str]] = {
    "plain": "\n\n".join,
    "JSON list": json.dumps,
    "str of a list": str,
    "indented": lambda texts: "\n\n".join(textwrap.indent(text, "    ") for text in texts),
    "quoted": lambda texts: "\n".join("> " + text.replace("\n", "\n> ") for text in texts),
    "CRLF": lambda texts: "\n\n".join(texts).replace("\n", "\r\n"),
    "collapsed": lambda texts: "\n\n".join(" ".join(text.split()) for text in texts),
    "tags": lambda texts: "<doc>" + "</doc><doc>".join(texts) + "</doc>",
    "HTML": lambda texts: html.escape("\n\n".join(texts)),
}


def passages(count: int) -> list[str]:
    """Texts of two paragraphs with lines, of about 200 tokens or more; some hold many quotes."""
    texts = load_real_texts().passages
    long = [one for one in texts if 70 <= len(one.split()) <= 120]
    long.sort(key=lambda one: -one.count('"'))
    filled = [textwrap.fill(text, LINE) for text in long[: 2 * count]]
    return ["\n\n".join(pair) for pair in zip(filled[::2], filled[1::2], strict=True)]


def is_part(one: FoundChunk, chunk: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether what is found are those of the chunk's tokens that it says."""
    own = [*chunk[one.before : len(chunk) - one.after]]
    return one.name.chunk_id == chunk_id(chunk) and own == [*tokens[one.start : one.end]]


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="module")
def finder(tokenizer: Any) -> Iterator[Finder]:
    """A finder that knows the passages, and no other ones."""
    lead_in = LeadInId("none", "", 0)
    with closing(Finder(vocabulary=lambda: Vocabulary.of(tokenizer))) as made:
        for text in passages(20):
            ids = tokenizer.encode(text, add_special_tokens=False)
            made.learn("default", ComputedRun(lead_in, ids, [(0, len(ids))], [(chunk_id(ids), "")]))
        assert made.settle()
        yield made


@pytest.mark.parametrize("form", FORMS)
def test_of_a_re_encoded_passage_most_tokens_are_found(
    finder: Finder, tokenizer: Any, form: str
) -> None:
    texts = passages(20)
    own = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    whole = {chunk_id(ids): ids for ids in own}
    for first in range(0, 20, 4):
        prompt = FORMS[form](texts[first : first + 4]) + QUESTION
        tokens = tokenizer.encode(prompt, add_special_tokens=False)
        found = finder.find("default", tokens)
        assert all(is_part(one, whole[one.name.chunk_id], tokens) for one in found)
        shares = [
            sum(one.tokens for one in found if one.name.chunk_id == chunk_id(ids)) / len(ids)
            for ids in own[first : first + 4]
        ]
        assert min(shares) >= SHARE, shares


def test_who_knows_what_stands_around_learns_nothing_token_by_token(
    finder: Finder, tokenizer: Any
) -> None:
    """Only the whole of what is between two known parts tells that it is right."""
    text = passages(1)[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    secret = slice(100, 106)

    def told(*tokens: int) -> int:
        prompt = [*ids[: secret.start], *tokens, *ids[secret.stop :], 1]
        return sum(one.tokens for one in finder.find("default", prompt))

    nothing = told(7, 7)
    for right in range(1, 6):
        assert told(*ids[secret][:right], 7) == nothing
        assert told(7, *ids[secret][-right:]) == nothing
    assert told(*ids[secret]) > nothing


def test_a_prompt_of_re_encoded_parts_takes_bounded_time() -> None:
    """Texts are compared a bounded number of times, however many parts a prompt is made of."""
    asked = list[Sequence[int]]()

    def says(tokens: Sequence[int]) -> str:
        asked.append(tokens)
        return "same"

    lead_in = LeadInId("none", "", 0)
    with closing(Finder(vocabulary=lambda: Vocabulary(says))) as finder:
        chunk = range(1000, 51_000)
        finder.learn(
            "default", ComputedRun(lead_in, chunk, [(0, len(chunk))], [(chunk_id(chunk), "")])
        )
        assert finder.settle()
        hostile = [token for at in range(0, 50_000, 10) for token in (*chunk[at : at + 8], 7, 7)]
        asked.clear()
        found = finder.find("default", hostile)
        assert 0 < len(asked) <= 2 * (MOST_COMPARED + len(found))


def test_an_engine_reuses_what_a_tool_returned_as_json(tokenizer: Any) -> None:
    """And says how much, for the stored chunks that it is of."""
    model = make_model(vocab_size=len(tokenizer))
    config = BlendConfig(recompute_ratio=0.0, min_tokens=64, cost_model=False)
    texts = passages(3)
    with closing(TransformersEngine(model, tokenizer=tokenizer, config=config)) as engine:
        engine.precompute([Chunk(text) for text in texts], progress=False)
        own = {chunk_id(one.token_ids): len(one.token_ids) for one in map(engine.prepare, texts)}
        for form, said in (
            ("JSON list", "escaped, as in JSON"),
            ("quoted", "with other white space, or quoted"),
            ("HTML", "escaped, as in HTML"),
        ):
            content = FORMS[form](texts)
            prompt = [{"role": "user", "content": f"{content}{QUESTION}"}]
            report = engine.generate(prompt, SamplingParams(max_tokens=1)).report
            assert all(chunk.hit for chunk in report.chunks)
            parts = {name: [c for c in report.chunks if c.chunk_id == name] for name in own}
            assert sum(map(len, parts.values())) == len(report.chunks)
            for name, several in parts.items():
                found, size = sum(chunk.tokens for chunk in several), own[name]
                told = None if found == size else f"{said}: {found} of {size} tokens found"
                assert {chunk.altered for chunk in several} == {told}
            assert report.reused_tokens >= SHARE * sum(own.values())
            asked = SamplingParams(max_tokens=1, logprobs=5)
            exact = engine.generate(prompt, asked, config=config.with_changes(recompute_ratio=1.0))
            assert exact.text == engine.generate_full(prompt, asked).text
