"""Which chunks are found in prompts, and which KV answers for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from cacheblend_rag.engines import finder as finder_module
from cacheblend_rag.engines import found_chunk
from cacheblend_rag.engines.catalog import ComputedRun
from cacheblend_rag.engines.finder import Finder
from cacheblend_rag.engines.found_chunk import FoundChunk, Vocabulary
from cacheblend_rag.kv.chunk_kv import chunk_id, prefix_ids
from cacheblend_rag.prefill.lead_in import LeadInId

BARE = LeadInId("none", "", 0)
BOS = LeadInId("bos", chunk_id((1,)), 0)
DOCUMENT = LeadInId("document", "", 2048)
FIRST, SECOND, THIRD, OTHER = (tuple(range(n * 1000, n * 1000 + 40 + n)) for n in range(1, 5))
BETWEEN, QUESTION = (7, 7), (9,) * 12
VOCABULARY = Vocabulary(
    lambda tokens: "".join(" " if token in (5, 7) else f"<{token}>" for token in tokens),
    opening=(1,),
)


def run(
    *chunks: Sequence[int], lead_in: LeadInId = BARE, separator: Sequence[int] = (5,)
) -> ComputedRun:
    """A document whose chunks were precomputed together."""
    tokens: list[int] = []
    starts: list[int] = []
    for chunk in chunks:
        tokens += separator if tokens else ()
        starts.append(len(tokens))
        tokens += chunk
    contexts = prefix_ids(tokens, starts) if lead_in.name == "document" else [""] * len(chunks)
    spans = [(start, start + len(chunk)) for start, chunk in zip(starts, chunks, strict=True)]
    keys = [(chunk_id(chunk), context) for chunk, context in zip(chunks, contexts, strict=True)]
    return ComputedRun(lead_in, tokens, spans, keys)


def learn(finder: Finder, work: ComputedRun, namespace: str = "default", **result: Any) -> None:
    finder.learn(namespace, replace(work, **result))
    assert finder.settle()


def prompt(*chunks: Sequence[int]) -> list[int]:
    return [token for chunk in chunks for token in (*BETWEEN, *chunk)] + list(QUESTION)


def found(finder: Finder, *chunks: Sequence[int], namespace: str = "default") -> list[FoundChunk]:
    return finder.find(namespace, prompt(*chunks))


def ids(chunks: Sequence[FoundChunk]) -> list[str]:
    return [one.name.chunk_id for one in chunks]


@pytest.fixture
def finder() -> Iterator[Finder]:
    with closing(Finder(vocabulary=lambda: VOCABULARY)) as made:
        yield made


# Finding


def test_a_whole_chunk_is_found_rather_than_a_part_of_a_longer_one(finder: Finder) -> None:
    longer = (*FIRST, *range(9000, 9040))
    learn(finder, run(longer))
    learn(finder, run(FIRST))
    [one] = found(finder, FIRST)
    assert (one.name.chunk_id, one.before, one.after) == (chunk_id(FIRST), 0, 0)
    assert ids(found(finder, longer)) == [chunk_id(longer)]
    learn(finder, run((8, *BETWEEN[1:], *SECOND)))  # alike from the token before it on
    learn(finder, run(SECOND))
    [other] = found(finder, SECOND)
    assert (other.name.chunk_id, other.before, other.after) == (chunk_id(SECOND), 0, 0)


def test_who_knows_a_part_cannot_try_what_comes_next(finder: Finder) -> None:
    """What is found tells no single token beyond what was known, on either side."""
    secret = tuple(range(5000, 5200))
    learn(finder, run(secret))

    def told(*tokens: int) -> list[tuple[int, int]]:
        found = finder.find("default", [*QUESTION, *tokens, *QUESTION])
        return [(one.end - one.start, one.before) for one in found]

    for known in (secret[40:90], secret[:57], secret[100:150], secret[:64]):
        at = secret.index(known[0])
        end = at + len(known)
        nothing = told(9, *known, 9)
        for more in range(1, -end % 16 or 16):
            assert told(9, *known, *secret[end : end + more], 9) == nothing, "right, and not told"
        if at:
            for more in range(1, at % 16 or 16):
                assert told(9, *secret[at - more : at], *known, 9) == nothing
        assert told(9, *known, *secret[end : end + 16], 9) != nothing, (
            "16 at once cannot be guessed"
        )


def test_a_chunks_edges_alone_count_token_by_token(finder: Finder) -> None:
    """As docs/security.md says: a tokenizer may have split them differently."""
    secret = tuple(range(5000, 5200))
    learn(finder, run(secret))

    def lacking(tokens: Sequence[int]) -> int:
        [one] = finder.find("default", [*QUESTION, *tokens, *QUESTION])
        return one.before + one.after

    assert [lacking(secret[:-n]) for n in range(1, 6)] == [1, 2, 3, 4, 200 - 192]
    assert [lacking(secret[n:]) for n in range(1, 6)] == [1, 2, 3, 4, 16]


# Variants


def test_in_its_document_a_chunk_is_the_one_of_the_document(finder: Finder) -> None:
    learn(finder, run(SECOND, lead_in=DOCUMENT))
    learn(finder, run(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    bare, contextual = "", run(FIRST, SECOND, lead_in=DOCUMENT).keys[1][1]
    assert [c.name.context_id for c in found(finder, FIRST, SECOND)] == ["", contextual]
    assert [c.name.context_id for c in found(finder, SECOND)] == [bare]
    assert [c.name.context_id for c in found(finder, OTHER, SECOND)] == [bare]


@pytest.mark.parametrize(
    ("standing", "protected"),
    [
        ((FIRST, SECOND, THIRD), [False, False, False]),
        ((SECOND, THIRD), [True, True]),
        ((FIRST, THIRD), [False, True]),
        ((FIRST, THIRD, SECOND), [False, True, True]),
        ((FIRST, SECOND[:35], THIRD), [False, False, True]),
    ],
)
def test_context_that_is_absent_is_protected(
    finder: Finder, standing: Any, protected: list[bool]
) -> None:
    learn(finder, run(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    assert [one.protected for one in found(finder, *standing)] == protected


# Documents answer only for themselves

POISON = tuple(range(9000, 9040))


def used(finder: Finder, *chunks: Sequence[int]) -> list[str]:
    """The contexts whose KV answers for the last chunk; none if it is computed."""
    last = chunk_id(chunks[-1])
    return [c.name.context_id for c in found(finder, *chunks) if c.name.chunk_id == last]


@pytest.mark.parametrize("first", ["manual", "upload"])
@pytest.mark.parametrize(
    ("upload", "separator"),
    [((POISON, SECOND), (5,)), ((POISON, FIRST, SECOND), (5,)), ((FIRST, SECOND), POISON[:4])],
)
def test_another_documents_kv_answers_for_no_passage(
    finder: Finder, upload: Sequence[Sequence[int]], separator: Sequence[int], first: str
) -> None:
    manual = run(FIRST, SECOND, lead_in=DOCUMENT)
    stranger = run(*upload, lead_in=DOCUMENT, separator=separator)
    for one in (manual, stranger) if first == "manual" else (stranger, manual):
        learn(finder, one)
    own = manual.keys[1][1]
    assert used(finder, FIRST, SECOND) == [own], "all that is before it there is before it here"
    assert used(finder, SECOND) == used(finder, OTHER, SECOND) == [], "it is computed"
    learn(finder, run(SECOND, lead_in=DOCUMENT))
    assert used(finder, SECOND) == used(finder, OTHER, SECOND) == [""]
    assert used(finder, FIRST, SECOND) == [own]
    finder.forget("default", DOCUMENT, [(chunk_id(SECOND), own)])
    assert used(finder, FIRST, SECOND) == [""]


def test_whose_lead_in_does_not_begin_the_prompt_answers_for_no_passage(finder: Finder) -> None:
    """What an instruction says before a chunk colours its KV just as a document does."""
    strange = LeadInId("document", chunk_id(POISON), 2048)
    learn(finder, run(SECOND, lead_in=strange))
    assert len(found(finder, SECOND)) == 1, "the only one who has stored it"
    learn(finder, run(FIRST, SECOND, lead_in=DOCUMENT))
    assert [one.name.lead_in for one in found(finder, FIRST, SECOND)] == [DOCUMENT] * 2
    assert found(finder, SECOND) == [], "two have stored it, and none is meant"
    [here] = finder.find("default", [*POISON, *prompt(SECOND)])
    assert here.name.lead_in == strange, "the prompt has that instruction itself"


def test_unconfirmed_contexts_can_be_left_out() -> None:
    with closing(Finder(vocabulary=lambda: VOCABULARY, unconfirmed_context=False)) as finder:
        work = run(FIRST, SECOND, lead_in=DOCUMENT)
        learn(finder, work)
        assert used(finder, SECOND) == []
        assert used(finder, FIRST, SECOND) == [work.keys[1][1]]
        learn(finder, run(THIRD, lead_in=LeadInId("document", chunk_id(POISON), 2048)))
        assert used(finder, THIRD) == []
        learn(finder, run(SECOND, lead_in=DOCUMENT))
        assert used(finder, SECOND) == [""]


# Forgetting


def test_what_is_forgotten_is_not_found(finder: Finder) -> None:
    work = run(FIRST, SECOND)
    learn(finder, work)
    finder.forget("other", BARE, [(chunk_id(FIRST), "")])
    finder.forget("default", BOS, [(chunk_id(FIRST), "")])
    assert len(found(finder, FIRST, SECOND)) == 2
    finder.forget("default", BARE, [(chunk_id(FIRST), ""), (chunk_id(OTHER), "")])
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)], "at once"
    assert finder.settle()
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)]


def test_each_deletion_of_a_chunk_counts_for_what_was_blended_of_it(finder: Finder) -> None:
    learn(finder, run(FIRST, SECOND))
    numbers = [[one.deletions for one in found(finder, FIRST, SECOND)]]
    for _ in range(2):
        finder.forget("default", BARE, [(chunk_id(FIRST), "")])
        learn(finder, run(FIRST))
        numbers.append([one.deletions for one in found(finder, FIRST, SECOND)])
    assert len({first for first, _ in numbers}) == 3
    assert [second for _, second in numbers] == [0, 0, 0]


def test_what_the_store_lost_stays_known(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while it is not looked for, unless it was stored again, and another variant is used."""
    learn(finder, run(FIRST, SECOND))
    names = [one.name for one in found(finder, FIRST, SECOND)]
    finder.note_missing(names)
    assert [one.is_missing for one in found(finder, FIRST, SECOND)] == [True, True]
    learn(finder, run(FIRST), fresh=(0,))
    assert [one.is_missing for one in found(finder, FIRST, SECOND)] == [False, True]
    learn(finder, run(SECOND, lead_in=BOS))
    assert [one.is_missing for one in found(finder, SECOND)] == [False]
    finder.forget("default", BOS, [(chunk_id(SECOND), "")])
    monkeypatch.setattr(finder_module, "MISSING_SECONDS", 0.0)
    finder.note_missing(names)
    assert [one.is_missing for one in found(finder, SECOND)] == [False]


def test_of_too_many_chunks_those_known_first_are_forgotten(
    finder: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found_chunk, "MOST_CHUNKS", 2)
    learn(finder, run(OTHER), "other")
    for chunk in (FIRST, SECOND, THIRD):
        learn(finder, run(chunk))
    assert finder.settle()
    assert ids(found(finder, FIRST, SECOND, THIRD)) == [chunk_id(THIRD)]
    assert len(found(finder, OTHER, namespace="other")) == 1
    monkeypatch.setattr(found_chunk, "MOST_TOKENS", 60)
    learn(finder, run(OTHER), "other")
    assert finder.settle()
    assert len(found(finder, THIRD)) + len(found(finder, OTHER, namespace="other")) == 1
