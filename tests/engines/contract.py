"""EngineContract: what the parts of an engine rely on beyond tests/contracts/engine.py.

Prepared prompts, keys, hooks, idle work, siblings. Subclassed once an engine, with a fixture
``engine``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, Engine, Generation, LeadInConfig
from cacheblend_rag.engines.answer import Delta, Request
from cacheblend_rag.engines.lifetime import IdleJob
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.encoder import PromptEncoder
from tests.contracts.engine import CLOSED, LONG, MANY, SHORT, Texts, joined

CONFIG = BlendConfig(min_tokens=0, selector="hkvd")
"""What an engine under test is opened with, around the words of ``make_tokenizer``."""
REUSE = CONFIG.with_changes(recompute_ratio=0.0)
ALL = CONFIG.with_changes(recompute_ratio=1.0)
PATIENCE = 60.0
"""Seconds after which a test that waits has failed; none waits so long otherwise."""


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
    """The promises. The last test closes the engine, which the others may share."""

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
            assert hooked._idle.add(IdleJob("endless", endless))
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
        for open_ in (engine, other):
            assert open_.is_open
            assert len(open_.generate(texts.text(9), SHORT).token_ids) == SHORT.max_tokens

    # The end

    def test_closing_ends_siblings_and_what_follows(self, engine: Engine, texts: Texts) -> None:
        """Last: it closes the engine that the others may share."""
        sibling = engine.sibling(lead_in="none")
        stream = sibling.stream(texts.text(20), LONG)
        next(stream)
        engine.close()
        with pytest.raises(ConfigError, match=CLOSED):
            list(stream)
        for closed in (engine, sibling):
            assert not closed.is_open
            self._refuses_everything(closed)
            closed.close()

    def _refuses_everything(self, engine: Engine) -> None:
        calls: list[Callable[[], object]] = [
            *(partial(way, engine, "w1") for way in WAYS.values()),
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


def check_prefilled_instead(answer: Generation, plain: Generation, tiers: list[str]) -> None:
    """Hold an answer over chunks in these tiers to ordinary prefill, which was the faster way."""
    assert answer.token_ids == plain.token_ids
    assert not answer.report.blended
    assert answer.report.reason is not None
    assert answer.report.reason.startswith("ordinary prefill takes ")
    assert [chunk.reason for chunk in answer.report.chunks] == ["slow"] * len(tiers)
    assert [chunk.tier for chunk in answer.report.chunks] == tiers
