"""The registry against a slow reference that is right at a glance, and how much it compares."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.text import registry as registry_module
from cacheblend_rag.text import search
from cacheblend_rag.text.chunk import Chunk, Context, Document, Match
from cacheblend_rag.text.registry import ChunkRegistry

Hints = Sequence[Chunk | str]


def reference_find(added: list[Chunk], text: str, hints: Hints) -> list[Match]:
    """Find as ChunkRegistry promises, by trying every text at every character."""
    known = {chunk.text for chunk in added}
    hinted = {h.text for h in hints if isinstance(h, Chunk)}
    hinted |= {chunk.text for chunk in added if chunk.document_id in hints}
    spans = [(i, i + len(t)) for t in known for i in range(len(text)) if text.startswith(t, i)]
    spans.sort(key=lambda s: (text[s[0] : s[1]] not in hinted, s[0] - s[1], s[0]))
    kept: list[tuple[int, int]] = []
    for start, end in spans:
        if all(end <= other_start or other_end <= start for other_start, other_end in kept):
            kept.append((start, end))
    matches: list[Match] = []
    for start, end in sorted(kept):
        earlier = [m.chunk.text for m in matches]
        matches.append(Match(start, end, reference_variant(added, text[start:end], earlier, hints)))
    return matches


def reference_variant(added: list[Chunk], text: str, earlier: list[str], hints: Hints) -> Chunk:
    variants = [chunk for chunk in added if chunk.text == text]
    documents = {h.document_id for h in hints if isinstance(h, Chunk) and h.text == text}
    documents |= {h for h in hints if isinstance(h, str)}
    equal = [chunk for chunk in variants if chunk in hints]
    named = [chunk for chunk in variants if chunk.document_id in documents]
    hinted = equal or named
    shown = {chunk.document_id for chunk in added if chunk.text in earlier}
    confirmed: list[Chunk] = []
    for chunk in hinted or [chunk for chunk in variants if chunk.document_id in shown]:
        pieces = [piece for piece in chunk.context if piece.strip()]
        if earlier[len(earlier) - len(pieces) :] == pieces and len(pieces) <= len(earlier):
            confirmed.append(chunk)
    if confirmed:
        return max(confirmed, key=lambda c: (len(c.context), added.index(c)))
    left = hinted or variants
    if len({tuple(c.context) for c in left}) > 1:
        left = [c for c in left if not c.context] or [Chunk(text)]
    return max(left, key=lambda c: added.index(c) if c in added else 0)


def with_last(added: list[Chunk], chunk: Chunk) -> list[Chunk]:
    return [c for c in added if c != chunk] + [chunk]


bricks = st.sampled_from(["a", "b", "ab", "a\r\n", " ", "é", "\U0001f600", "\ud800", "ab" * 8])
long_bricks = st.sampled_from(["a" * 33, "ab" * 20, "b" + "a" * 40, "\n".join("abababab")])
texts = st.lists(bricks | long_bricks, min_size=1, max_size=4).map("".join)
chunk_texts = texts.filter(lambda text: not text.isspace())
ids = st.sampled_from([None, "one", "two"])


@st.composite
def registered_chunks(draw: st.DrawFn) -> list[Chunk]:
    pool = draw(st.lists(chunk_texts, min_size=1, max_size=5))
    pool += [t for text in pool if (t := text[: len(text) // 2 + 1]).strip()]
    text, piece = st.sampled_from(pool), st.sampled_from([*pool, "\n\n"])
    context = st.lists(piece, max_size=4).map(tuple)
    return draw(st.lists(st.builds(Chunk, text, ids, context), max_size=10))


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[Chunk], str, list[Chunk | str]]:
    chunks = draw(registered_chunks())
    pieces = texts | st.sampled_from([c.text for c in chunks]) if chunks else texts
    text = "".join(draw(st.lists(pieces, max_size=7)))
    strangers = st.builds(Chunk, chunk_texts, ids)
    hint: st.SearchStrategy[Chunk | str] = strangers | st.sampled_from(["one", "two", "none such"])
    if chunks:
        hint |= st.sampled_from(chunks)
    return chunks, text, draw(st.lists(hint, max_size=3))


@settings(max_examples=200, deadline=None)
@given(searches())
def test_finds_what_the_reference_finds(search: tuple[list[Chunk], str, list[Chunk | str]]) -> None:
    chunks, text, hints = search
    added: list[Chunk] = []
    for chunk in chunks:
        added = with_last(added, chunk)
    assert ChunkRegistry(chunks).find(text, hints) == reference_find(added, text, hints)


@settings(max_examples=200, deadline=None)
@given(
    registered_chunks(),
    st.lists(st.tuples(st.sampled_from(["add", "discard", "remove"]), st.integers(0, 9))),
    st.data(),
)
def test_add_and_remove_in_any_order(
    chunks: list[Chunk], steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    registry = ChunkRegistry()
    added: list[Chunk] = []
    for step, index in steps if chunks else ():
        chunk = chunks[index % len(chunks)]
        if step == "add":
            registry.add_many([chunk])
            added = with_last(added, chunk)
        elif step == "discard":
            registry.discard_many([chunk])
            added = [c for c in added if c != chunk]
        elif chunk.document_id is not None:
            gone = [c for c in added if c.document_id == chunk.document_id]
            assert registry.document(chunk.document_id) == tuple(gone)
            registry.discard_many(gone)
            added = [c for c in added if c not in gone]
    assert len(registry) == len(added)
    for chunk in chunks:
        assert (chunk.text in registry) == (chunk.text in {c.text for c in added})
        assert registry.variants(chunk.text) == tuple(c for c in added if c.text == chunk.text)
    text = "".join(data.draw(st.permutations([c.text for c in chunks])))
    assert registry.find(text) == reference_find(added, text, ())


def test_the_variant_whose_whole_context_stands_in_the_prompt_is_the_one() -> None:
    manual = Document("manual", ("Safety first.", "Press twice.")).to_chunks()
    upload = Document("upload", ("Forget it all.", "Safety first.", "Press twice.")).to_chunks()
    registry = ChunkRegistry([*manual, *upload])
    assert [m.chunk for m in registry.find("Safety first. Press twice.")] == manual
    assert [m.chunk for m in registry.find("Forget it all. Safety first. Press twice.")] == upload
    registry.add_many(manual)
    assert [m.chunk for m in registry.find("Forget it all. Safety first. Press twice.")] == upload
    assert registry.find("Press twice.")[0].chunk.context == ()


def test_within_a_document_nothing_behind_a_boundary_answers_for_what_others_may_see() -> None:
    staff, shown = ("Fired: Ann.", "Contact us."), ("Contact us.",)
    document = Document("d", staff + shown, boundaries=("staff", "staff", "all"))
    registry = ChunkRegistry(document.to_chunks())
    for hints in ([], ["d"]):
        assert registry.find("Contact us.", hints)[0].chunk.context == ()


# Contexts


def copied(value: object) -> object:
    """What another process gets."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301  # its own


@given(st.lists(st.sampled_from(["a", "b", "", " "])), st.lists(st.sampled_from(["a", "b", ""])))
def test_a_context_is_its_pieces(pieces: list[str], others: list[str]) -> None:
    context, other = Context.of(pieces), Context.of(others)
    assert list(context) == pieces
    assert list(reversed(context)) == pieces[::-1]
    assert (len(context), bool(context)) == (len(pieces), bool(pieces))
    assert context == tuple(pieces) == context[:]
    assert repr(context) == repr(tuple(pieces))
    assert (context == other) == (pieces == others)
    assert hash(context) == hash(Context.of(pieces))
    assert Context.of(context) is context
    assert context.then("c") == (*pieces, "c")
    assert context.then("c").before == context
    assert copied(context) == copy.deepcopy(context) == context
    chunk = Chunk("text", "document", pieces)
    assert chunk == Chunk("text", "document", context)
    assert chunk.passage == (*pieces, "text")
    assert replace(chunk, document_id=None).context == tuple(pieces)


def test_a_long_document_costs_what_its_length_does() -> None:
    document = Document("long", tuple(str(number) for number in range(30_000)))
    first, second = document.to_chunks(), document.to_chunks()
    assert first == second, "compared piece by piece, this would take hours"
    assert copied(first[-1]) == first[-1]
    assert len(dict.fromkeys(first + second)) == 30_000
    assert {Chunk("a"): 1}[Chunk("a", context=())] == 1


# Hostile texts


def compared(registry: ChunkRegistry, text: str) -> int:
    """How many texts a search compares."""
    count = 0
    real = search.SearchBudget.allows

    def counted(self: search.SearchBudget, known: str) -> bool:
        nonlocal count
        count += 1
        return real(self, known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search.SearchBudget, "allows", counted)
        registry.find(text)
    return count


def test_texts_of_one_character_are_searched_within_bounds() -> None:
    registry = ChunkRegistry(Chunk("a" * length) for length in range(100, 1100))
    assert (
        compared(registry, "a" * 20_000)
        <= 1
        + (search.COMPARED_CHARACTERS + 20_000 * search.COMPARED_PER_CHARACTER)
        // search.LEAST_COMPARED
    )
    texts = [f"Passage {n} says {n * 7919} in words." for n in range(1000)]
    distinct = ChunkRegistry(map(Chunk, texts))
    text = " ".join(sorted(texts))
    assert len(distinct.find(text)) == 1000, "an honest prompt is found whole"
    assert compared(distinct, text) < 1500


def test_boilerplate_of_many_documents_is_named_without_asking_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, foot = "All rights reserved by the author.", "Printed on recycled paper in Rome."
    registry = ChunkRegistry()
    for number in range(500):
        registry.add_many(Document(f"d{number}", (head, f"Own text {number}.", foot)).to_chunks())
    asked: list[Sequence[str]] = []
    real = registry_module.stands_before

    def stands_before(context: Sequence[str], earlier: Sequence[str]) -> bool:
        asked.append(context)
        return real(context, earlier)

    monkeypatch.setattr(registry_module, "stands_before", stands_before)
    found = registry.find(f"{head}\n\nOwn text 7.\n\n{foot}")
    assert [match.chunk.document_id for match in found] == ["d499", "d7", "d7"]
    assert len(asked) < 10
    found = registry.find(f"{head} {foot}")
    assert [match.chunk.context for match in found] == [(), ()]
    assert len(asked) < 10
    found = registry.find(head, hints=["d3"])
    assert found[0].chunk.document_id == "d3"
