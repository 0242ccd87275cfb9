"""Lead-ins without an engine: what a chunk is computed behind, its key, and what is protected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendPrompt, Chunk, Document, LeadInConfig
from cacheblend_rag.kv.chunk_kv import chunk_id, fingerprint
from cacheblend_rag.prefill.lead_in import (
    ChunkPlan,
    DocumentWindow,
    LeadIn,
    PlacedChunk,
    next_window,
    place_chunks,
)
from cacheblend_rag.text.chat import render_chat
from cacheblend_rag.text.encoder import PromptEncoder
from tests.models import make_tokenizer, words
from tests.tokenizer_kinds import CORPUS, KINDS, tokenizer_of

INSTRUCTION = words(4, 50)
PIECES = tuple(words(12 + i, i) for i in range(4))
DOCUMENT = Document("doc", PIECES, separator=" w77 ")


def make_lead_in(
    name: str = "document",
    window: int = 2048,
    instruction: str = "",
    model: str = "m",
    namespace: str = "default",
) -> LeadIn:
    return LeadIn(
        PromptEncoder(make_tokenizer()),
        LeadInConfig(kind=name, document_window=window),  # type: ignore[arg-type]
        instruction=instruction,
        identity={"model": model},
        namespace=namespace,
    )


def ids(text: str) -> tuple[int, ...]:
    return tuple(make_tokenizer()(text, add_special_tokens=False)["input_ids"])


# What a chunk is computed behind


@pytest.mark.parametrize(
    ("name", "instruction", "lead"),
    [
        ("none", INSTRUCTION, ""),
        ("bos", INSTRUCTION, ""),
        ("instruction", INSTRUCTION, INSTRUCTION),
        ("instruction", "", ""),
        ("document", INSTRUCTION, INSTRUCTION),
    ],
)
def test_a_chunk_with_its_lead_in_and_its_key(name: str, instruction: str, lead: str) -> None:
    behind = make_lead_in(name, instruction=instruction)
    last = DOCUMENT.to_chunks()[2]
    context = ids(f"{PIECES[0]} w77 {PIECES[1]} w77")
    plan = behind.resolve(last)
    assert plan == ChunkPlan(ids(PIECES[2]), ids(lead), context, behind.key(last))
    assert plan.key.chunk_id == chunk_id(ids(PIECES[2]))
    assert plan.key.fingerprint == behind.fingerprint
    assert plan.key.context_id == (chunk_id(context) if name == "document" else "")
    assert behind.key(DOCUMENT.to_chunks()[0]).context_id == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_rendered", [False, True])
def test_the_lead_in_has_bos_where_prompts_have_it(kind: str, is_rendered: bool) -> None:
    """A chat template without BOS makes prompts without BOS, also where the tokenizer adds it."""
    tokenizer = tokenizer_of(kind)
    encoder = PromptEncoder(tokenizer)
    content = f"Read this.\n\n{CORPUS[1]}"
    text = f"Instruction: {content}"
    if is_rendered:
        system = {"role": "system", "content": "Be brief."}
        text = render_chat([system, {"role": "user", "content": content}], tokenizer).text
    instruction = text.partition(CORPUS[1])[0]
    chunk = Chunk(CORPUS[1])
    prompt = BlendPrompt.of(instruction, chunk, text.partition(CORPUS[1])[2])
    encoded = replace(prompt, is_rendered=is_rendered).encode(encoder)
    behind = LeadIn(
        encoder, LeadInConfig(), instruction=instruction, identity={}, namespace="default"
    )
    assert behind.resolve(chunk).lead == encoded.token_ids[: encoded.spans[0].start]


def test_the_fingerprint_is_of_what_kv_depends_on() -> None:
    made = {
        make_lead_in(**changed).fingerprint
        for changed in (
            {}, {"name": "bos"}, {"name": "none"}, {"name": "instruction"}, {"window": 44},
            {"instruction": INSTRUCTION}, {"model": "other"}, {"namespace": "theirs"},
            {"name": "instruction", "instruction": INSTRUCTION},
        )
    }  # fmt: skip
    assert len(made) == 9
    windows = {make_lead_in("bos", window=n).fingerprint for n in (44, 2048)}
    assert len(windows) == 1, "there is no window without a document"
    parts = {"model": "m", "lead_in": "bos", "lead_tokens": chunk_id(()), "window": 0}
    assert windows == {fingerprint(parts, "default")}


# Windows


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_window_never_holds_more_than_it_may(lengths: list[int], window: int) -> None:
    kept: DocumentWindow = ()
    for index, length in enumerate(lengths):
        kept = next_window(kept, (index,) * length, window)
    assert sum(map(len, kept)) <= window
    start = len(lengths) - len(kept)
    assert [len(piece) for piece in kept] == lengths[start:]
    assert (start == 0) == (sum(lengths) <= window or not lengths)


def lengths(pieces: Sequence[Sequence[int]]) -> list[int]:
    return [len(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("kept", "piece", "window", "left"),
    [
        ((4, 4), 2, 10, [4, 4, 2]),  # just full
        ((4, 4), 3, 10, [3]),  # the last half: 4 and 3 are more than 5
        ((4, 2), 5, 10, [5]),
        ((4, 2), 3, 8, [3]),
        ((4, 2), 2, 7, [2]),
        ((6, 2), 2, 9, [2, 2]),  # four are half of nine, rounded down
        ((), 11, 10, []),
        ((3,), 8, 10, []),
    ],
)
def test_of_a_window_outgrown_the_last_half_stays(
    kept: Sequence[int], piece: int, window: int, left: list[int]
) -> None:
    pieces = tuple((7,) * n for n in kept)
    assert lengths(next_window(pieces, (7,) * piece, window)) == left


# Chunks in a prompt


def placed(*parts: str | Chunk, name: str = "document") -> list[PlacedChunk]:
    spaced = [part for each in parts for part in (each, " ")][:-1]
    lead_in = make_lead_in(name)
    encoded = BlendPrompt.of(*spaced).encode(lead_in.encoder)
    found = place_chunks(encoded.spans, lead_in)
    assert [chunk.key for chunk in found] == [lead_in.key(span.chunk) for span in encoded.spans]
    assert [(c.start, c.end) for c in found] == [(s.start, s.end) for s in encoded.spans]
    assert [c.document_id for c in found] == [s.chunk.document_id for s in encoded.spans]
    return found


def test_a_chunk_is_protected_unless_its_document_stands_before_it() -> None:
    one, two, three = Document("plain", PIECES[:3], separator="\n").to_chunks()
    lone = Chunk(words(9, 9))

    def protected(*chunks: Chunk, name: str = "document") -> list[bool]:
        return [chunk.protected for chunk in placed("w3", *chunks, "w4", name=name)]

    assert protected(one, two, three) == [False, False, False]
    assert protected(two) == [True]
    assert protected(one, three) == [False, True]
    assert protected(two, one) == [True, False]
    assert protected(one, lone, two) == [False, False, True], "not right before it"
    assert protected(lone, one, two, three) == [False] * 4
    assert protected(two, three, name="instruction") == [False, False]
    assert protected(*DOCUMENT.to_chunks()[:2]) == [False, True], "w77 is in no chunk"
