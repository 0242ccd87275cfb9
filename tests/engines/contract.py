"""EngineContract: what the parts of an engine rely on beyond tests/contracts/engine.py.

Prepared prompts, keys, hooks, idle work, siblings. Subclassed once an engine, with a fixture
``engine``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, Chunk, Engine, Generation, LeadInConfig
from cacheblend_rag.engines.answer import Delta, Request
from cacheblend_rag.engines.idle import IdleJob
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.text.encoder import PromptEncoder
from tests.contracts.engine import CLOSED, LONG, MANY, SHORT, Texts, joined, read
from tests.models import make_tokenizer

CONFIG = BlendConfig(min_tokens=0, selector="hkvd")
"""What an engine under test is opened with, around the words of ``make_tokenizer``."""
REUSE = CONFIG.with_changes(recompute_ratio=0.0)
ALL = CONFIG.with_changes(recompute_ratio=1.0)
PATIENCE = 60.0
"""Seconds after which a test that waits has failed; none waits so long otherwise."""


class Watched:
    """What an engine is asked and how it ends: requests in the order they began, reasons."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Request] = []
        self.reasons: SimpleQueue[str] = SimpleQueue()
        start = engine._start

        def watched_start(request: Request) -> Any:
            self.begun.append(request)
            return start(request)

        def watched_answer(request: Request, answer: Generation) -> None:
            self.reasons.put(answer.finish_reason)

        monkeypatch.setattr(engine, "_start", watched_start)
        engine.after_answer(watched_answer)


async def _astreamed(engine: Engine, prompt: PromptLike) -> Generation:
    return joined([delta async for delta in engine.astream(prompt, SHORT)])


WAYS: dict[str, Callable[[Engine, PromptLike], Generation]] = {
    "generate": lambda engine, prompt: engine.generate(prompt, SHORT),
    "generate_full": lambda engine, prompt: engine.generate_full(prompt, SHORT),
    "stream": lambda engine, prompt: joined(engine.stream(prompt, SHORT)),
    "generate_batch": lambda engine, prompt: engine.generate_batch([prompt], SHORT)[0],
    "agenerate": lambda engine, prompt: asyncio.run(engine.agenerate(prompt, SHORT)),
    "astream": lambda engine, prompt: asyncio.run(_astreamed(engine, prompt)),
}
"""Every way to get an answer of an engine."""


class EngineContract:
    """The promises. The last test closes the engine, which the others may share.

    tells_what_it_stores: whether KV that no registered chunk has can be found.
    """

    tells_what_it_stores = True

    def at_work(self, engine: Any) -> int:
        """How many requests an engine's own threads or processes are busy with."""
        return 0

    @contextmanager
    def busy(self, engine: Any) -> Iterator[None]:
        """Let an engine be at work on a request for the time of a test."""
        stream = engine.stream("w7 w8 w9", LONG)
        next(stream)
        try:
            yield
        finally:
            stream.close()

    @pytest.fixture
    def texts(self, request: pytest.FixtureRequest) -> Texts:
        return Texts(request.node.name)

    @pytest.fixture
    def watched(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watched:
        return Watched(engine, monkeypatch)

    # Facts

    def test_a_texts_tokens_are_those_it_has_in_prompts(self, engine: Engine, texts: Texts) -> None:
        assert engine.tokenize("w5 w6") == (5, 6)
        with pytest.raises(PromptError, match="surrogate"):
            engine.tokenize("\ud800")
        chunk = texts.chunks(12)[0]
        prepared = engine.prepare(texts.asking(chunk))
        [span] = prepared.encoded.spans
        assert prepared.token_ids[span.start : span.end] == engine.tokenize(chunk.text)

    def test_a_key_names_tokens_fingerprint_and_context(self, engine: Engine, texts: Texts) -> None:
        document = texts.document(8, 9)
        first, second = document.to_chunks()
        assert engine.key(first).fingerprint == engine.fingerprint
        assert engine.key(first) == engine.key(Chunk(first.text)), "nothing precedes either"
        assert engine.key(second) != engine.key(Chunk(second.text))
        assert engine.key(second).chunk_id == engine.key(Chunk(second.text)).chunk_id
        assert engine.key(first).chunk_id != engine.key(second).chunk_id

    # Preparing

    def test_a_prepared_prompt_is_what_is_served(self, engine: Engine, texts: Texts) -> None:
        document = texts.document(10, 20, 15)
        chunks = document.to_chunks()
        engine.register([document])
        prompt = texts.asking(chunks[2], chunks[0])
        by_text, by_parts = engine.prepare(prompt.text), engine.prepare(prompt)
        ids = tuple(make_tokenizer()(prompt.text)["input_ids"])
        for prepared in (by_text, by_parts):
            assert prepared.text == prompt.text
            assert prepared.token_ids == ids
            assert [(span.start, span.end) for span in prepared.encoded.spans] == [
                (5, 20),
                (21, 31),
            ]
            assert [(placed.start, placed.end) for placed in prepared.placed] == [(5, 20), (21, 31)]
            assert [placed.key for placed in prepared.placed] == [
                engine.key(chunks[2]),
                engine.key(chunks[0]),
            ]
            assert [placed.document_id for placed in prepared.placed] == [document.document_id] * 2
            assert prepared.room == engine.context_window - len(ids)
            assert prepared.expects_chunks
            assert prepared.unmatched == ()
        assert engine.generate(prompt, SHORT).prompt_tokens == len(ids)

    # What is reused

    def test_a_prompt_is_compared_with_full_prefill_at_once(
        self, engine: Engine, texts: Texts
    ) -> None:
        chunks = texts.chunks(40, 30)
        engine.precompute(chunks, progress=False)
        prompt = texts.asking(*chunks)
        answer = engine.generate_full(prompt, SHORT).token_ids
        exact, reused = (
            engine.compare_with_full_prefill(prompt, answer, config=config)
            for config in (ALL, REUSE)
        )
        assert exact is not None
        assert reused is not None
        assert 0 <= exact.blend <= reused.blend

    def test_full_prefill_takes_a_salt(self, engine: Engine, texts: Texts) -> None:
        prompt = texts.text(40)
        wanted = engine.generate_full(prompt, SHORT).token_ids
        for _ in range(2):
            answer = engine.generate_full(prompt, SHORT, cache_salt="shared")
            assert answer.token_ids == wanted

    # Batches

    # Index time

    def test_which_chunks_are_stored(self, engine: Engine, texts: Texts) -> None:
        document, other = texts.document(30, 20), texts.document(25)
        engine.precompute([document], progress=False)
        keys = [engine.key(chunk) for chunk in (*document.to_chunks(), *other.to_chunks())]
        assert engine.stored(keys) == [True, True, False]
        assert engine.stored(keys[::-1]) == [False, True, True]
        assert engine.stored([]) == []
        before = engine.stored_chunks()
        engine.evict_document(document.document_id)
        assert engine.stored(keys) == [False] * 3
        after = engine.stored_chunks()
        assert (before is None) == (after is None)
        assert before is None or after is None or before - after == 2

    def test_kv_that_no_document_knows_can_be_dropped(self, engine: Engine, texts: Texts) -> None:
        lost, kept = texts.document(10, 20), texts.document(12)
        engine.precompute([lost, kept], progress=False)
        engine.registry.discard_many(engine.registry.document(lost.document_id))
        if not self.tells_what_it_stores:
            with pytest.raises(ConfigError, match="cannot list its stored chunks"):
                engine.evict_unregistered()
            return
        assert engine.evict_unregistered() == 2
        assert engine.evict_unregistered() == 0
        hits = engine.generate(texts.asking(*kept.to_chunks()), SHORT).report.chunks
        assert [chunk.hit for chunk in hits] == [True]
        assert engine.precompute([lost], progress=False).computed == 2

    # Hooks after an answer

    @pytest.fixture
    def hooked(self, engine: Engine) -> Iterator[Engine]:
        """A sibling, to which a test may add hooks and idle jobs."""
        sibling = engine.sibling(lead_in="bos")
        yield sibling
        sibling.close()

    @pytest.mark.parametrize("way", WAYS)
    def test_hooks_see_every_answer_before_its_caller_does(
        self, hooked: Engine, texts: Texts, way: str
    ) -> None:
        chunks = texts.chunks(20, 30)
        hooked.register(chunks)
        seen: list[tuple[Request, Generation]] = []

        def relabel(request: Request, answer: Generation) -> Generation:
            chunks = tuple(replace(one, document_id="seen") for one in answer.report.chunks)
            return replace(answer, report=replace(answer.report, chunks=chunks))

        def see(request: Request, answer: Generation) -> None:
            seen.append((request, answer))

        hooked.after_answer(relabel)
        hooked.after_answer(see)
        prompt = texts.asking(*chunks)
        answer = WAYS[way](hooked, prompt)
        [(request, told)] = seen
        assert request.prepared.text == prompt.text
        assert told == answer, "hooks run in order, and what they return is what the caller gets"
        placed = [one.document_id for one in told.report.chunks]
        assert placed == ([] if way == "generate_full" else ["seen", "seen"])

    def test_hooks_see_cancelled_answers(self, hooked: Engine, texts: Texts) -> None:
        seen: list[str] = []
        hooked.after_answer(lambda request, answer: seen.append(answer.finish_reason))  # type: ignore[arg-type, return-value]
        cancel = Event()
        cancel.set()
        hooked.generate(texts.text(20), LONG, cancel=cancel)
        joined(hooked.stream(texts.text(20), LONG, cancel=cancel))
        meanwhile = Event()
        for _ in hooked.stream(texts.text(20), LONG, cancel=meanwhile):
            meanwhile.set()
        assert seen == ["cancelled"] * 3

    # Idle work

    def test_idle_jobs_run_only_in_idle_time(self, hooked: Engine) -> None:
        steps: SimpleQueue[int] = SimpleQueue()
        begun, go_on = Event(), Event()

        def endless() -> Generator[None, None, None]:
            for step in count():
                if step == 1:
                    begun.set()
                    go_on.wait(PATIENCE)
                steps.put(step)
                yield

        with self.busy(hooked):
            assert hooked.when_idle(IdleJob("endless", endless))
            time.sleep(0.3)
            assert steps.empty()
        assert steps.get(timeout=PATIENCE) == 0
        assert begun.wait(PATIENCE)
        with self.busy(hooked):
            go_on.set()
            assert steps.get(timeout=PATIENCE) == 1, "a request ends no step"
            time.sleep(0.3)
            assert steps.empty(), "but comes before the next one"
        assert steps.get(timeout=PATIENCE) == 2

    def test_an_idle_job_may_ask_the_engine(self, hooked: Engine, texts: Texts) -> None:
        answers: SimpleQueue[Generation] = SimpleQueue()
        prompt = texts.text(20)

        def ask() -> Generator[None, None, None]:
            for delta in hooked.stream(prompt, SHORT):
                if delta.generation is not None:
                    answers.put(delta.generation)
                yield

        assert hooked.when_idle(IdleJob("ask", ask))
        assert answers.get(timeout=PATIENCE).token_ids == hooked.generate(prompt, SHORT).token_ids

    # Prepared prompts

    @pytest.mark.parametrize("way", WAYS)
    def test_a_prepared_prompt_is_not_encoded_again(
        self, engine: Engine, texts: Texts, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        chunks = texts.chunks(20, 30)
        engine.precompute(chunks, progress=False)
        prepared = engine.prepare(texts.asking(*chunks).text, hints=chunks)
        encoded: list[object] = []
        encode = PromptEncoder.encode
        monkeypatch.setattr(
            PromptEncoder,
            "encode",
            lambda *given, **options: encoded.append(given) or encode(*given, **options),  # type: ignore[func-returns-value]
        )
        answer = WAYS[way](engine, prepared)
        assert encoded == []
        assert answer.prompt_tokens == len(prepared.token_ids)
        told = answer.report.seconds
        assert (told.find, told.tokenize) == (prepared.find_seconds, prepared.tokenize_seconds)
        assert answer.report.blended == (way != "generate_full")
        assert engine.prepare(prepared) is prepared
        WAYS[way](engine, prepared.text)
        assert len(encoded) == 1, "this is how encoding would have been seen"

    def test_a_prompt_prepared_before_chunks_changed_is_prepared_again(
        self, engine: Engine, texts: Texts
    ) -> None:
        first, second = texts.chunks(20, 30)
        engine.precompute([first], progress=False)
        text = texts.asking(first, second).text
        early = engine.prepare(text)
        engine.precompute([second], progress=False)
        assert len(early.placed) == 1
        assert len(engine.prepare(early).placed) == 2
        report = engine.generate(early, SHORT).report
        assert [chunk.hit for chunk in report.chunks] == [True, True]

    def test_a_prompt_that_another_engine_prepared_is_prepared_again(
        self, engine: Engine, hooked: Engine, texts: Texts
    ) -> None:
        chunks = texts.chunks(20)
        engine.precompute(chunks, progress=False)
        prepared = engine.prepare(texts.asking(*chunks).text, hints=chunks)
        again = hooked.prepare(prepared)
        assert (again.placed, again.hints) == ((), chunks)
        assert [told.reason for told in again.unmatched] == ["unknown"]
        assert hooked.generate(prepared, SHORT).report.reason == "no known chunk in the prompt"

    def test_hints_belong_to_the_preparation(
        self, engine: Engine, texts: Texts, watched: Watched
    ) -> None:
        chunk = texts.chunks(9)[0]
        prepared = engine.prepare(texts.asking(chunk))
        with pytest.raises(PromptError, match=r"give them to engine.prepare\(\)"):
            engine.generate(prepared, SHORT, hints=[chunk])
        assert watched.begun == []

    # Siblings

    def test_a_sibling_shares_model_and_store(self, engine: Engine, texts: Texts) -> None:
        chunks = texts.chunks(30, 20)
        engine.precompute(chunks, progress=False)
        one, twin = (
            engine.sibling(lead_in="none"),
            engine.sibling(lead_in=LeadInConfig(kind="none")),
        )
        assert one.lead_in == LeadInConfig(kind="none")
        assert engine.lead_in == LeadInConfig()
        assert one.fingerprint == twin.fingerprint != engine.fingerprint
        assert len(one.registry) == 0
        prompt = texts.asking(*chunks)
        assert one.generate_full(prompt, SHORT).token_ids == (
            engine.generate_full(prompt, SHORT).token_ids
        )
        assert not one.generate(texts.asking(*chunks), SHORT).report.blended
        assert one.precompute(chunks, progress=False).computed == 2
        assert twin.precompute(chunks, progress=False).skipped == 2
        report = one.generate(texts.asking(*chunks), SHORT, config=REUSE).report
        assert (report.reused_tokens, report.lead_in) == (50, "none")
        assert engine.precompute(chunks, progress=False).skipped == 2
        with pytest.raises(ConfigError, match="lead_in="):
            engine.sibling(lead_in="nonsense")

    def test_a_siblings_end_is_its_own(self, engine: Engine, texts: Texts) -> None:
        sibling, other = engine.sibling(lead_in="none"), engine.sibling(lead_in="bos")
        grandchild = sibling.sibling(lead_in="bos")
        stream = sibling.stream(texts.text(20), LONG)
        next(stream)
        sibling.close()
        left: list[Delta] = []
        with pytest.raises(ConfigError, match=CLOSED):
            left.extend(stream)
        assert len(left) < MANY // 2, "it was stopped, not only refused at its end"
        for closed in (sibling, grandchild):
            assert not closed.is_open
            self._refuses_everything(closed)
        self._wait_until_idle(engine)
        for open_ in (engine, other):
            assert open_.is_open
            assert len(open_.generate(texts.text(9), SHORT).token_ids) == SHORT.max_tokens

    # The end

    def test_closing_ends_siblings_and_what_follows(self, engine: Engine, texts: Texts) -> None:
        """Last: it closes the engine that the others may share."""
        sibling = engine.sibling(lead_in="none")
        checked = engine._request(texts.text(20), SHORT)
        stream = sibling.stream(texts.text(20), LONG)
        next(stream)
        engine.close()
        with pytest.raises(ConfigError, match=CLOSED):
            list(stream)
        for late in (
            engine._start(checked).last,
            lambda: asyncio.run(read(engine._start(checked))),
        ):
            with pytest.raises(ConfigError, match=CLOSED):
                late()
        for closed in (engine, sibling):
            assert not closed.is_open
            self._refuses_everything(closed)
            closed.close()

    def _refuses_everything(self, engine: Engine) -> None:
        calls: list[Callable[[], object]] = [
            *ways_to_ask(engine, "w1"),
            lambda: engine.prepare("w1"),
            lambda: engine.precompute(["w1"], progress=False),
            lambda: engine.register(["w1"]),
            lambda: engine.prefetch(["any"]),
            lambda: engine.evict_document("any"),
            engine.evict_unregistered,
            engine.release,
            lambda: engine.sibling(lead_in="none"),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=CLOSED):
                call()

    def _wait_until_idle(self, engine: Engine) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.at_work(engine) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.at_work(engine) == 0


def ways_to_ask(engine: Engine, prompt: Any, **options: Any) -> Sequence[Callable[[], object]]:
    """Every way to ask an engine; with options, those that take them."""

    ways: list[Callable[[], object]] = [
        lambda: engine.generate(prompt, SHORT, **options),
        lambda: engine.stream(prompt, SHORT, **options),
        lambda: engine.generate_batch([prompt], SHORT, **options),
        lambda: asyncio.run(engine.agenerate(prompt, SHORT, **options)),
        lambda: asyncio.run(read(engine.astream(prompt, SHORT, **options))),
    ]
    return ways if options else [*ways, lambda: engine.generate_full(prompt, SHORT)]


def check_prefilled_instead(answer: Generation, plain: Generation, tiers: list[str]) -> None:
    """Hold an answer over chunks in these tiers to ordinary prefill, which was the faster way."""
    assert answer.token_ids == plain.token_ids
    assert not answer.report.blended
    assert answer.report.reason is not None
    assert answer.report.reason.startswith("ordinary prefill takes ")
    assert [chunk.reason for chunk in answer.report.chunks] == ["slow"] * len(tiers)
    assert [chunk.tier for chunk in answer.report.chunks] == tiers
