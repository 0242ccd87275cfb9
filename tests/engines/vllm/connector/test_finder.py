"""Which stored chunks are found in prompts, and what keeps them known. No vLLM is needed."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.engines.vllm.connector import finder as finder_module
from cacheblend_rag.engines.vllm.connector import token_file
from cacheblend_rag.engines.vllm.connector.finder import Finder
from cacheblend_rag.engines.vllm.connector.found_chunk import FoundChunk, Vocabulary
from cacheblend_rag.engines.vllm.connector.token_file import FILE_NAME
from cacheblend_rag.engines.vllm.protocol.job import BlendJob, SentChunk, SentLeadIn
from cacheblend_rag.engines.vllm.protocol.result import PrecomputeResult
from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.kv.chunk_kv import chunk_id, prefix_ids

BARE = SentLeadIn("none", "", 0)
BOS = SentLeadIn("bos", chunk_id((1,)), 0)
DOCUMENT = SentLeadIn("document", "", 2048)
FIRST, SECOND, THIRD, OTHER = (tuple(range(n * 1000, n * 1000 + 40 + n)) for n in range(1, 5))
BETWEEN, QUESTION = (7, 7), (9,) * 12
VOCABULARY = Vocabulary(lambda tokens: {5, 7} >= set(tokens), opening=(1,))


def job(*chunks: Sequence[int], lead_in: SentLeadIn = BARE, separator: Sequence[int] = (5,)) -> Any:
    """A precompute job as our client sends it, of one document."""
    tokens: list[int] = []
    starts: list[int] = []
    for chunk in chunks:
        tokens += separator if tokens else ()
        starts.append(len(tokens))
        tokens += chunk
    contexts = prefix_ids(tokens, starts) if lead_in.name == "document" else [""] * len(chunks)
    sent = tuple(
        SentChunk(start, start + len(chunk), context)
        for start, chunk, context in zip(starts, chunks, contexts, strict=True)
    )
    return BlendJob("precompute", lead_in, sent, tokens=tuple(tokens))


def learn(finder: Finder, work: BlendJob, namespace: str = "default", **result: Any) -> None:
    finder.learn(namespace, work, PrecomputeResult(len(work.chunks), **result))
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


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Open finders over one file."""
    monkeypatch.setattr(finder_module, "REFRESH_SECONDS", 0.02)
    made: list[Finder] = []

    def open_finder(model: str = "m", **options: Any) -> Finder:
        options = {"vocabulary": lambda: VOCABULARY, **options}
        made.append(Finder(tmp_path / FILE_NAME, lambda: model, **options))
        assert made[-1].settle()
        return made[-1]

    yield open_finder
    for one in made:
        one.close()


# Finding


def test_chunks_are_found_where_they_stand(finder: Finder) -> None:
    learn(finder, job(FIRST, SECOND))
    tokens = prompt(SECOND, OTHER, FIRST)
    one, other = finder.find("default", tokens)
    assert tuple(tokens[one.sent.start : one.sent.end]) == SECOND
    assert tuple(tokens[other.sent.start : other.sent.end]) == FIRST
    assert ids([one, other]) == [chunk_id(SECOND), chunk_id(FIRST)]
    assert one.sent.own_tokens(tokens) == SECOND
    assert one.sent.lead_in == BARE
    assert finder.find("default", list(OTHER)) == []


def test_a_part_names_the_whole_chunk(finder: Finder) -> None:
    long = tuple(range(5000, 5200))
    learn(finder, job(long))
    tokens = [*QUESTION, *long[30:90], 3, 3, *long[93:], *QUESTION]
    parts = finder.find("default", tokens)
    assert [(p.sent.start, p.sent.end) for p in parts] == [(14, 62), (77, 181)]
    assert {p.sent.own_tokens(tokens) for p in parts} == {long}


def test_who_knows_a_part_cannot_try_what_comes_next(finder: Finder) -> None:
    """What is found tells no single token beyond what was known, on either side."""
    secret = tuple(range(5000, 5200))
    learn(finder, job(secret))

    def told(*tokens: int) -> list[tuple[int, int]]:
        found = finder.find("default", [*QUESTION, *tokens, *QUESTION])
        return [(one.sent.end - one.sent.start, len(one.sent.before)) for one in found]

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
    learn(finder, job(secret))

    def lacking(tokens: Sequence[int]) -> int:
        [one] = finder.find("default", [*QUESTION, *tokens, *QUESTION])
        return len(one.sent.before) + len(one.sent.after)

    assert [lacking(secret[:-n]) for n in range(1, 6)] == [1, 2, 3, 4, 200 - 192]
    assert [lacking(secret[n:]) for n in range(1, 6)] == [1, 2, 3, 4, 16]


def test_parts_of_very_long_chunks_are_bounded(
    finder: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler hands on the tokens that a prompt lacks of each chunk."""
    monkeypatch.setattr(finder_module, "MOST_ABSENT", 1000)
    long = tuple(range(10_000, 11_000))
    learn(finder, job(long))
    parts = [long[start : start + 48] for start in range(0, 960, 96)]
    told = found(finder, *parts)
    assert len(told) == 1
    assert len(found(finder, long)) == 1


def test_the_last_token_is_vllms(finder: Finder) -> None:
    learn(finder, job(FIRST))
    [one] = finder.find("default", list(FIRST))
    assert (one.sent.end, one.sent.after) == (len(FIRST) - 1, FIRST[-1:])
    assert finder.find("default", []) == finder.find("default", [1]) == []


def test_only_what_is_stored_is_learned(finder: Finder) -> None:
    learn(finder, job(FIRST, SECOND, THIRD), lost=(1,), fresh=(0,))
    assert ids(found(finder, FIRST, SECOND, THIRD)) == [chunk_id(FIRST), chunk_id(THIRD)]


def test_short_chunks_are_left_out(finder: Finder) -> None:
    learn(finder, job(FIRST[:31], SECOND))
    assert ids(found(finder, FIRST[:31], SECOND)) == [chunk_id(SECOND)]


# Variants


def test_in_its_document_a_chunk_is_the_one_of_the_document(finder: Finder) -> None:
    learn(finder, job(SECOND, lead_in=DOCUMENT))
    learn(finder, job(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    bare, contextual = "", job(FIRST, SECOND, lead_in=DOCUMENT).chunks[1].context_id
    assert [c.sent.context_id for c in found(finder, FIRST, SECOND)] == ["", contextual]
    assert [c.sent.context_id for c in found(finder, SECOND)] == [bare]
    assert [c.sent.context_id for c in found(finder, OTHER, SECOND)] == [bare]


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
    learn(finder, job(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    assert [one.sent.protected for one in found(finder, *standing)] == protected


def test_a_document_stored_in_parts_is_one_document(finder: Finder) -> None:
    """A window that moved on gives another job, whose first chunk comes after what was stored."""
    whole = job(FIRST, SECOND, THIRD, lead_in=DOCUMENT)
    learn(finder, BlendJob("precompute", DOCUMENT, whole.chunks[:2], tokens=whole.tokens))
    learn(finder, BlendJob("precompute", DOCUMENT, whole.chunks[2:], tokens=whole.tokens))
    told = found(finder, FIRST, SECOND, THIRD)
    assert [one.sent.protected for one in told] == [False] * 3


def test_of_several_lead_ins_the_one_most_like_a_prompt_is_taken(finder: Finder) -> None:
    for lead_in in (BARE, DOCUMENT, BOS):
        learn(finder, job(FIRST, lead_in=lead_in))
        learn(finder, job(SECOND, THIRD, lead_in=BARE))
    learn(finder, job(SECOND, lead_in=BOS))
    told = [one.sent.lead_in for one in found(finder, FIRST, SECOND, THIRD)]
    assert told == [DOCUMENT, BOS, BARE]


# Documents answer only for themselves

POISON = tuple(range(9000, 9040))


def used(finder: Finder, *chunks: Sequence[int]) -> list[str]:
    """The contexts whose KV answers for the last chunk; none if it is computed."""
    last = chunk_id(chunks[-1])
    return [c.sent.context_id for c in found(finder, *chunks) if c.name.chunk_id == last]


@pytest.mark.parametrize("first", ["manual", "upload"])
@pytest.mark.parametrize(
    ("upload", "separator"),
    [((POISON, SECOND), (5,)), ((POISON, FIRST, SECOND), (5,)), ((FIRST, SECOND), POISON[:4])],
)
def test_another_documents_kv_answers_for_no_passage(
    finder: Finder, upload: Sequence[Sequence[int]], separator: Sequence[int], first: str
) -> None:
    manual = job(FIRST, SECOND, lead_in=DOCUMENT)
    stranger = job(*upload, lead_in=DOCUMENT, separator=separator)
    for one in (manual, stranger) if first == "manual" else (stranger, manual):
        learn(finder, one)
    own = manual.chunks[1].context_id
    assert used(finder, FIRST, SECOND) == [own], "all that is before it there is before it here"
    assert used(finder, SECOND) == used(finder, OTHER, SECOND) == [], "it is computed"
    learn(finder, job(SECOND, lead_in=DOCUMENT))
    assert used(finder, SECOND) == used(finder, OTHER, SECOND) == [""]
    assert used(finder, FIRST, SECOND) == [own]
    finder.forget("default", DOCUMENT, [(chunk_id(SECOND), own)])
    assert used(finder, FIRST, SECOND) == [""]


def test_whose_lead_in_does_not_begin_the_prompt_answers_for_no_passage(finder: Finder) -> None:
    """What an instruction says before a chunk colours its KV just as a document does."""
    strange = SentLeadIn("document", chunk_id(POISON), 2048)
    learn(finder, job(SECOND, lead_in=strange))
    assert len(found(finder, SECOND)) == 1, "the only one who has stored it"
    learn(finder, job(FIRST, SECOND, lead_in=DOCUMENT))
    assert [one.name.lead_in for one in found(finder, FIRST, SECOND)] == [DOCUMENT] * 2
    assert found(finder, SECOND) == [], "two have stored it, and none is meant"
    [here] = finder.find("default", [*POISON, *prompt(SECOND)])
    assert here.name.lead_in == strange, "the prompt has that instruction itself"


def test_unconfirmed_contexts_can_be_left_out() -> None:
    with closing(Finder(vocabulary=lambda: VOCABULARY, unconfirmed_context=False)) as finder:
        work = job(FIRST, SECOND, lead_in=DOCUMENT)
        learn(finder, work)
        assert used(finder, SECOND) == []
        assert used(finder, FIRST, SECOND) == [work.chunks[1].context_id]
        learn(finder, job(THIRD, lead_in=SentLeadIn("document", chunk_id(POISON), 2048)))
        assert used(finder, THIRD) == []
        learn(finder, job(SECOND, lead_in=DOCUMENT))
        assert used(finder, SECOND) == [""]


# Forgetting


def test_what_is_forgotten_is_not_found(finder: Finder) -> None:
    work = job(FIRST, SECOND)
    learn(finder, work)
    finder.forget("other", BARE, [(chunk_id(FIRST), "")])
    finder.forget("default", BOS, [(chunk_id(FIRST), "")])
    assert len(found(finder, FIRST, SECOND)) == 2
    finder.forget("default", BARE, [(chunk_id(FIRST), ""), (chunk_id(OTHER), "")])
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)], "at once"
    assert finder.settle()
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)]


def test_of_variants_one_is_forgotten(finder: Finder) -> None:
    for lead_in in (BARE, BOS):
        learn(finder, job(FIRST, lead_in=lead_in))
    finder.forget("default", BOS, [(chunk_id(FIRST), "")])
    assert [one.sent.lead_in for one in found(finder, FIRST)] == [BARE]


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_stored_anew_has_another_generation(
    finder: Finder, opened: Any, kept: bool
) -> None:
    finder = opened() if kept else finder

    def generation() -> int:
        return found(finder, FIRST)[0].generation

    learn(finder, job(FIRST), fresh=(0,))
    first = generation()
    learn(finder, job(FIRST))
    assert generation() == first, "it was stored already"
    learn(finder, job(FIRST), fresh=(0,))
    second = generation()
    assert second != first
    finder.forget("default", BARE, [(chunk_id(FIRST), "")])
    learn(finder, job(FIRST))
    assert generation() not in (first, second)


@pytest.mark.parametrize("kept", [False, True])
def test_a_loss_that_is_told_late_forgets_nothing_that_was_stored_again(
    finder: Finder, opened: Any, kept: bool
) -> None:
    finder = opened() if kept else finder
    learn(finder, job(FIRST, SECOND))
    lost = [(one.name, one.generation) for one in found(finder, FIRST, SECOND)]
    learn(finder, job(FIRST), fresh=(0,))
    finder.forget_lost(lost)
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(FIRST)], "at once"
    assert finder.settle()
    for one in (finder, opened() if kept else finder):
        assert ids(found(one, FIRST, SECOND)) == [chunk_id(FIRST)], "and for good"


def test_of_too_many_chunks_those_stored_first_are_forgotten(
    finder: Finder, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder_module, "MOST_CHUNKS", 2)
    for one in (finder, opened()):
        learn(one, job(OTHER), "other")
        learn(one, job(FIRST, SECOND))
        learn(one, job(THIRD))
        assert one.settle()
        assert ids(found(one, FIRST, SECOND, THIRD)) == [chunk_id(THIRD)]
        assert len(found(one, OTHER, namespace="other")) == 1
    assert ids(found(opened(), FIRST, SECOND, THIRD)) == [chunk_id(THIRD)], "nor by a restart"


# The file


def test_a_restart_finds_them_again(opened: Any, tmp_path: Path) -> None:
    first = opened()
    learn(first, job(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    learn(first, job(OTHER), "tenant")
    first.forget("default", DOCUMENT, [(c.name.chunk_id, "") for c in found(first, FIRST)])
    first.close()
    again = opened()
    told = found(again, FIRST, SECOND, THIRD)
    assert [(c.name.chunk_id, c.sent.protected) for c in told] == [
        (chunk_id(SECOND), True),
        (chunk_id(THIRD), True),
    ]
    assert ids(found(again, OTHER, namespace="tenant")) == [chunk_id(OTHER)]
    assert b"tenant" not in (tmp_path / FILE_NAME).read_bytes()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


def waited(check: Any) -> None:
    """Wait until another finder has read the file."""
    for _ in range(500):
        if check():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def test_who_only_reads_a_file_waits_until_it_has_been_made(opened: Any, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch(mode=0o600)
    early = opened(read_only=True)
    assert early.settle()
    learn(opened(), job(FIRST))
    waited(lambda: len(found(early, FIRST)) == 1)


@pytest.mark.parametrize("content", [b"no database at all" * 99, b"SQLite format 3\0"])
def test_a_damaged_file_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with closing(Finder(tmp_path / FILE_NAME, lambda: "m")) as finder:
        learn(finder, job(FIRST))
        assert len(found(finder, FIRST)) == 1
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "delete the file" in record.getMessage()


def test_a_file_that_is_damaged_later_loses_nothing_that_is_known(
    opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finder = opened()
    learn(finder, job(FIRST))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute("DROP TABLE chunks")
    learn(finder, job(SECOND))
    assert len(found(finder, FIRST, SECOND)) == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "change",
    [
        "chunk = upper(chunk)",
        "chunk = '" + "0" * 32 + "'",
        "context = 'elsewhere'",
        "namespace = '../up'",
        "lead = 'odd'",
        "lead_tokens = x'00'",
        "lead_window = 'wide'",
        "lead_window = -1",
        "follows = 7",
        "tokens = x'010203'",
        "tokens = x''",
        "tokens = 'text'",
        "tokens = tokens || x'01000000'",
        "tokens = zeroblob(5000000)",
    ],
)
def test_a_row_that_is_not_ours_is_left_out(opened: Any, tmp_path: Path, change: str) -> None:
    learn(opened(), job(FIRST, SECOND))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute(f"UPDATE OR REPLACE chunks SET {change} WHERE id = 1")  # noqa: S608
        file.commit()
    assert ids(found(opened(), FIRST, SECOND)) == [chunk_id(SECOND)]


def test_a_model_without_files_keeps_its_chunks_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise ModelLoadError("no safetensors")

    with closing(Finder(tmp_path / FILE_NAME, fail)) as finder:
        learn(finder, job(FIRST))
        assert len(found(finder, FIRST)) == 1
    assert "in memory only: no safetensors" in caplog.text
    assert not (tmp_path / FILE_NAME).exists()


def test_a_file_that_another_one_writes_makes_nobody_wait(opened: Any, tmp_path: Path) -> None:
    finder = opened()
    learn(finder, job(FIRST))
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as file:
        file.execute("BEGIN EXCLUSIVE")
        finder.learn("default", job(SECOND), PrecomputeResult(1))
        finder.forget("default", BARE, [(chunk_id(FIRST), "")])
        assert found(finder, FIRST, SECOND) == []
        file.execute("COMMIT")
    assert finder.settle()
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)]


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """A file that another process writes for longer than a finder waits."""
    with closing(Finder(tmp_path / FILE_NAME, lambda: "m")) as first:
        learn(first, job(FIRST))
    monkeypatch.setattr(token_file, "WAIT_SECONDS", 0.01)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as file:
        yield file


def test_a_file_that_is_busy_at_first_is_read_later(opened: Any, busy: sqlite3.Connection) -> None:
    busy.execute("BEGIN EXCLUSIVE")
    finder = opened()
    learn(finder, job(SECOND))
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)]
    busy.execute("COMMIT")
    waited(lambda: len(found(finder, FIRST, SECOND)) == 2)


def test_what_is_learned_and_forgotten_while_the_file_is_busy(
    opened: Any, busy: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = opened()
    busy.execute("BEGIN EXCLUSIVE")
    learn(finder, job(SECOND))
    finder.forget("default", BARE, [(chunk_id(FIRST), "")])
    assert finder.settle()
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)]
    monkeypatch.setattr(Finder, "_discard_rows", lambda self: None)
    busy.execute("COMMIT")
    learn(finder, job(FIRST))
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(FIRST), chunk_id(SECOND)]
    finder.forget("default", BARE, [(chunk_id(FIRST), "")])
    assert finder.settle()
    monkeypatch.undo()
    waited(lambda: busy.execute("SELECT count(*) FROM chunks").fetchone() == (0,))
    assert ids(found(finder, FIRST, SECOND)) == [chunk_id(SECOND)]
