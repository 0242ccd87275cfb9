"""EngineContract: what a user relies on in every engine. Subclassed once an engine."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import threading
import time
import zlib
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from itertools import count
from threading import Event
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Chunk,
    ConfigError,
    Delta,
    Document,
    Engine,
    Explanation,
    Generation,
    GuardConfig,
    PromptError,
    ReasonCode,
    SamplingParams,
    analyze_long_document,
)
from tests.models import make_model, make_tokenizer, prompt_of, words

WINDOW = 2048
"""The context window of an engine under test."""
CONFIG = BlendConfig(min_tokens=0, selector="hkvd", cost_model=False)
"""What an engine under test is opened with, around the words of ``make_tokenizer``."""
REUSE = CONFIG.with_changes(recompute_ratio=0.0, reuse_prefix=False)
ALL = CONFIG.with_changes(recompute_ratio=1.0)
SHORT = SamplingParams(max_tokens=6)
LIKELY = SamplingParams(max_tokens=1, logprobs=20)
MANY = 1500
LONG = SamplingParams(max_tokens=1 << 20)
"""All that the window has room for, more than MANY: whoever stops it stops it before its end."""
PATIENCE = 120.0
"""Seconds after which a test that waits has failed; none waits so long otherwise."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CLOSED = "the engine is closed: open another"


def tokenizer_with_template() -> PreTrainedTokenizerFast:
    """The words of ``make_tokenizer``, in which chat messages have no form of their own."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Texts:
    """Texts that no other test has: engines are shared, and so is what they store."""

    def __init__(self, test: str) -> None:
        self._seeds = count(zlib.crc32(test.encode()))

    def text(self, tokens: int) -> str:
        return words(tokens, next(self._seeds))

    def chunks(self, *tokens: int) -> list[Chunk]:
        """Chunks that stand alone."""
        return [Chunk(self.text(n)) for n in tokens]

    def document(self, *tokens: int, name: str = "", **fields: Any) -> Document:
        """A document, called as no other one is unless ``name`` says how."""
        pieces = tuple(self.text(n) for n in tokens)
        return Document(name or f"d{next(self._seeds)}", pieces, separator=" w77 ", **fields)

    def asking(self, *chunks: Chunk) -> BlendPrompt:
        """A prompt around chunks; never the same one twice, which an engine may remember."""
        parts = [part for chunk in chunks for part in (chunk, "w7")]
        return prompt_of(self.text(5), *parts, self.text(9))


async def _astreamed(engine: Engine, prompt: Any, *given: Any, **options: Any) -> Generation:
    return joined([delta async for delta in engine.astream(prompt, *given, **options)])


WAYS: dict[str, Callable[..., Generation]] = {
    "generate": lambda engine, *given, **more: engine.generate(*given, **more),
    "stream": lambda engine, *given, **more: joined(engine.stream(*given, **more)),
    "generate_batch": lambda engine, prompt, *given, **more: engine.generate_batch(
        [prompt], *given, **more
    )[0],
    "agenerate": lambda engine, *given, **more: asyncio.run(engine.agenerate(*given, **more)),
    "astream": lambda *given, **more: asyncio.run(_astreamed(*given, **more)),
    "generate_full": lambda engine, prompt, sampling, **_: engine.generate_full(prompt, sampling),
}
"""Every way to get an answer of an engine; each takes the engine, a prompt, SamplingParams."""
BLENDING = [way for way in WAYS if way != "generate_full"]


class EngineContract:
    """The promises. A subclass has a fixture ``engine``, open with CONFIG for all of its tests.

    The last test closes it.
    """

    def steps(self, engine: Engine) -> int:
        """Count what the model has done so far: at least one for each token of each answer."""
        raise NotImplementedError

    @pytest.fixture
    def texts(self, request: pytest.FixtureRequest) -> Texts:
        return Texts(request.node.name)

    @pytest.fixture
    def stops(self, engine: Engine) -> Iterator[None]:
        """What a test leaves behind ends long before MANY tokens."""
        before = self.steps(engine)
        yield
        assert self._after_all_work(engine) - before < MANY / 2

    def _after_all_work(self, engine: Engine) -> int:
        """Return the steps once no more are made."""
        last, done = -1, self.steps(engine)
        while last != done:
            time.sleep(0.2)
            last, done = done, self.steps(engine)
        return done

    def test_it_says_what_it_is(self, engine: Engine) -> None:
        assert engine.is_open
        assert engine.name
        assert engine.model_name
        assert engine.address
        assert engine.context_window == WINDOW
        assert engine.blend_refusal is None
        assert engine.namespace == "default"
        assert engine.config == CONFIG
        assert engine.has_chat_template
        assert not engine.fill_on_miss, "nothing is computed that nobody asked for"
        assert engine.guard is None, "nothing is computed that nobody asked for"

    # One answer

    def test_an_answer_has_text_tokens_and_a_reason(self, engine: Engine, texts: Texts) -> None:
        prompt = texts.text(14)
        answer = engine.generate(prompt, SHORT)
        assert len(answer.token_ids) == SHORT.max_tokens
        assert (answer.finish_reason, answer.prompt_tokens) == ("length", 14)
        assert answer.text.split() == make_tokenizer().decode(answer.token_ids).split()
        longer = engine.generate(prompt, SamplingParams(max_tokens=9))
        assert longer.token_ids[: SHORT.max_tokens] == answer.token_ids

    @pytest.mark.parametrize("way", BLENDING)
    def test_all_ways_answer_alike_texts_and_messages(
        self, engine: Engine, texts: Texts, way: str
    ) -> None:
        chunks = texts.chunks(40)
        engine.precompute(chunks, progress=False)
        prompt = texts.asking(*chunks).text
        wanted = engine.generate(prompt, SHORT, config=REUSE)
        for asked in (prompt, [{"role": "user", "content": prompt}]):
            answer = WAYS[way](engine, asked, SHORT, config=REUSE)
            assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
            assert answer.report.reused_tokens == wanted.report.reused_tokens == 40
            assert [chunk.hit for chunk in answer.report.chunks] == [True]

    @pytest.mark.parametrize("way", BLENDING)
    def test_a_stop_string_ends_an_answer(self, engine: Engine, texts: Texts, way: str) -> None:
        chunks = texts.chunks(50, 40)
        engine.precompute(chunks, progress=False)
        prompt = texts.asking(*chunks)
        whole = engine.generate(prompt, SamplingParams(max_tokens=12)).text
        said = whole.split()
        for stop in (said[7], f"{said[6]} {said[7]}"):  # of one token, and of two
            sampling = SamplingParams(max_tokens=12, stop=("never said", stop))
            answer = WAYS[way](engine, prompt, sampling)
            assert answer.finish_reason == "stop"
            assert answer.text == whole.partition(stop)[0]
            assert [chunk.hit for chunk in answer.report.chunks] == [True, True]

    def test_a_seed_decides_what_is_drawn(self, engine: Engine, texts: Texts) -> None:
        prompt = texts.text(14)

        def drawn(seed: int) -> tuple[int, ...]:
            sampling = SamplingParams(max_tokens=12, temperature=2.0, seed=seed)
            return engine.generate(prompt, sampling).token_ids

        assert drawn(3) == drawn(3)
        assert drawn(3) != drawn(4)

    def test_log_probabilities_are_told_to_who_asks(self, engine: Engine, texts: Texts) -> None:
        prompt, asked = texts.text(30), SamplingParams(max_tokens=6, logprobs=3)
        assert engine.generate(prompt, SHORT).logprobs is None
        for answer in (engine.generate(prompt, asked), joined(engine.stream(prompt, asked))):
            assert answer.logprobs is not None
            assert tuple(one.token_id for one in answer.logprobs) == answer.token_ids
            for one in answer.logprobs:
                assert one.top[0][0] == one.token_id, "greedy"
                values = [value for _, _, value in one.top]
                assert values == sorted(values, reverse=True)
                assert values[0] == pytest.approx(one.logprob, abs=1e-4)
                assert len(values) == 3
                assert values[0] <= 0

    def test_an_answer_ends_at_the_context_window(self, engine: Engine, texts: Texts) -> None:
        prompt = texts.text(engine.context_window - 3)
        answer = engine.generate(prompt, SamplingParams(max_tokens=50))
        assert (len(answer.token_ids), answer.finish_reason) == (3, "length")

    # Exactness

    def test_ratio_1_is_full_prefill_and_ratio_0_is_not(self, engine: Engine, texts: Texts) -> None:
        document = texts.document(60, 40, 50)
        engine.precompute([document], progress=False)
        prompt = texts.asking(*reversed(document.to_chunks()))
        blended = engine.generate(prompt, SHORT, config=ALL)
        full = engine.generate_full(prompt, SHORT)
        assert blended.report.blended
        assert (blended.report.reused_tokens, blended.report.recomputed_tokens) == (0, 150)
        assert (blended.token_ids, blended.text) == (full.token_ids, full.text)
        assert (full.report.blended, full.report.reason) == (False, "full prefill was asked for")
        assert full.report.reason_code is ReasonCode.FULL_PREFILL_ASKED
        assert full.report.computed_tokens == full.report.prompt_tokens
        assert full.report.compute_share == 1.0
        wanted = engine.generate_full(prompt, LIKELY)
        assert distance(engine.generate(prompt, LIKELY, config=ALL), wanted) < 1e-4
        assert distance(engine.generate(prompt, LIKELY, config=REUSE), wanted) > 1e-3

    def test_missing_chunks_are_computed(self, engine: Engine, texts: Texts) -> None:
        stored, missing = texts.chunks(50, 40)
        engine.precompute([stored], progress=False)
        engine.register([missing])
        for chunks in ([missing], [stored, missing]):
            prompt = texts.asking(*chunks)
            answer = engine.generate(prompt, SHORT, config=ALL)
            assert [chunk.hit for chunk in answer.report.chunks] == [c is stored for c in chunks]
            assert answer.token_ids == engine.generate_full(prompt, SHORT).token_ids

    # Reports

    def test_the_report_adds_up(self, engine: Engine, texts: Texts) -> None:
        chunks = texts.chunks(40, 60, 50, 45)
        engine.precompute(chunks[:3], progress=False)
        engine.register(chunks[3:])
        config = CONFIG.with_changes(recompute_ratio=0.2)
        answer = engine.generate(texts.asking(*chunks), SHORT, config=config)
        report = answer.report
        assert (report.blended, report.reason) == (True, None)
        assert [chunk.hit for chunk in report.chunks] == [True, True, True, False]
        assert [chunk.reason for chunk in report.chunks] == [None, None, None, "not stored"]
        assert [chunk.tier is None for chunk in report.chunks] == [False, False, False, True]
        assert [chunk.start for chunk in report.chunks] == [5, 46, 107, 158]
        assert [chunk.tokens for chunk in report.chunks] == [40, 60, 50, 45]
        assert report.prompt_tokens == answer.prompt_tokens == 5 + 41 + 61 + 51 + 46 + 9
        assert report.recomputed_tokens == sum(chunk.recomputed for chunk in report.chunks) == 30
        assert report.reused_tokens == 40 + 60 + 50 - 30
        assert report.computed_tokens == 5 + 45 + 4 + 9
        assert report.recompute_ratio == 0.2
        assert report.engine == engine.name
        assert 0 < report.compute_share <= 1
        assert json.loads(json.dumps(report.to_dict()))["chunks"][3]["reason"] == "not stored"

    def test_a_report_tells_its_request_and_phases(self, engine: Engine, texts: Texts) -> None:
        chunks = texts.chunks(40, 60)
        engine.precompute(chunks, progress=False)
        ids = set()
        for prompt in (texts.asking(*chunks), texts.text(20)):
            begun = time.perf_counter()
            report = engine.generate(prompt, SHORT).report
            took = time.perf_counter() - begun
            told = json.loads(json.dumps(report.to_dict()))
            ids.add(told["request_id"])
            seconds = told["seconds"]
            first, by_tier = seconds.pop("time_to_first_token"), seconds.pop("load_by_tier")
            del seconds["decode"], seconds["load_hidden"]
            assert 0 < first <= took
            assert min(seconds.values()) >= 0
            assert math.isclose(first, sum(seconds.values()))
            assert math.isclose(sum(by_tier.values()), seconds["load"], abs_tol=1e-9)
        assert len(ids) == 2
        assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)

    def test_every_miss_has_a_reason(self, engine: Engine, texts: Texts) -> None:
        plain = engine.generate(texts.text(40), SHORT).report
        assert (plain.blended, plain.reason) == (False, "no known chunk in the prompt")
        assert plain.reason_code is ReasonCode.NO_CHUNK
        assert plain.computed_tokens == plain.prompt_tokens == 40
        assert plain.chunks == ()

        stored, stranger = texts.chunks(40, 50)
        engine.precompute([stored], progress=False)
        engine.register([stranger])
        report = engine.generate(texts.asking(stranger), SHORT).report
        assert (report.blended, report.reason) == (False, "no chunk of the prompt is stored")
        assert report.reason_code is ReasonCode.NOT_STORED
        assert [chunk.reason_code for chunk in report.chunks] == [ReasonCode.NOT_STORED]

        few, enough = (CONFIG.with_changes(min_tokens=tokens) for tokens in (41, 40))
        report = engine.generate(texts.asking(stored), SHORT, config=few).report
        assert (report.blended, report.reason_code) == (False, ReasonCode.TOO_SHORT)
        assert report.reason == "40 reusable tokens are fewer than min_tokens=41"
        assert [(chunk.hit, chunk.reason) for chunk in report.chunks] == [(False, "too short")]
        assert engine.generate(texts.asking(stored), SHORT, config=enough).report.blended

    def test_what_is_found_of_a_passage_is_told(self, engine: Engine, texts: Texts) -> None:
        [whole] = texts.chunks(200)
        engine.precompute([whole], progress=False)
        for text, found, altered in (
            (" ".join(whole.text.split()[:100]), 96, "a part: 96 of 200 tokens found"),
            (whole.text.replace(" ", "\n"), 200, None),
        ):
            prompt = f"{texts.text(5)} {text} {texts.text(9)}"
            report = engine.generate(prompt, SHORT, config=REUSE).report
            assert [(c.hit, c.tokens, c.altered) for c in report.chunks] == [(True, found, altered)]

    def test_a_passage_that_its_encoding_hides_is_named_once(
        self, engine: Engine, texts: Texts, caplog: pytest.LogCaptureFixture
    ) -> None:
        with closing(engine.sibling(lead_in="none")) as fresh:
            fresh.precompute([hidden := Chunk("ж\n" * 40 + "ю")], progress=False)
            hiding = f"{json.dumps([hidden.text])} {texts.text(9)}"
            for prompt in (*(texts.text(9) for _ in range(5)), hiding, hiding):
                assert not fresh.generate(prompt, SHORT).report.blended
        [said] = [line for line in caplog.messages if line.startswith("nothing was reused")]
        assert "escaped, as in JSON" in said

    def test_a_trace_is_told_to_who_asks_for_it(self, engine: Engine, texts: Texts) -> None:
        chunks = texts.chunks(40, 60)
        engine.precompute(chunks, progress=False)
        prompt = texts.asking(*chunks)
        config = CONFIG.with_changes(recompute_ratio=0.2)
        assert engine.generate(prompt, SHORT, config=config).report.trace is None
        asked = config.with_changes(trace=True)
        for _ in range(2):  # also where the engine has served the prompt before
            report = engine.generate(prompt, SHORT, config=asked).report
            assert report.trace is not None
            assert report.recomputed_tokens == 20
            told = Explanation.of(report)
            assert sum(chunk.recomputed for chunk in told.chunks) == 20
            assert report.blended
            assert json.loads(json.dumps(told.to_dict()))["summary"] == told.summary
        assert engine.generate(texts.text(20), SHORT, config=asked).report.trace is None

    # Streams

    def test_a_stream_has_pieces_then_the_answer(self, engine: Engine, texts: Texts) -> None:
        deltas = list(engine.stream(texts.text(20), SHORT))
        assert len(deltas) > 2
        assert all(delta.generation is None for delta in deltas[:-1])
        assert joined(deltas).finish_reason == "length"

    @pytest.mark.parametrize("way", ["generate", "stream"])
    def test_one_token_brings_its_report(self, engine: Engine, texts: Texts, way: str) -> None:
        chunks = texts.chunks(40)
        engine.precompute(chunks, progress=False)
        answer = WAYS[way](engine, texts.asking(*chunks), SamplingParams(max_tokens=1))
        assert len(answer.token_ids) == 1
        assert [chunk.hit for chunk in answer.report.chunks] == [True]

    @pytest.mark.parametrize("is_read", [False, True])
    def test_closing_a_stream_stops_the_work(
        self, engine: Engine, texts: Texts, stops: None, is_read: bool
    ) -> None:
        cancel = Event()
        stream = engine.stream(texts.text(20), LONG, cancel=cancel)
        if is_read:
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert not cancel.is_set(), "it is the user's, and may stand for many requests"
        assert len(engine.generate(texts.text(20), SHORT).token_ids) == SHORT.max_tokens

    # Batches

    def test_a_batch_answers_in_order(self, engine: Engine, texts: Texts) -> None:
        chunks = texts.chunks(50, 40, 60)
        engine.precompute(chunks[:2], progress=False)
        engine.register(chunks)
        prompts = [
            texts.text(12),
            *(texts.asking(*chosen) for chosen in (chunks[:1], chunks, chunks[2:])),
            texts.asking(*chunks[:2]).text,
        ]
        alone = [engine.generate(prompt, SHORT).token_ids for prompt in prompts]
        assert len({*alone}) == len(alone)
        together = engine.generate_batch(prompts, SHORT)
        assert [answer.token_ids for answer in together] == alone
        told = [[chunk.hit for chunk in answer.report.chunks] for answer in together]
        assert [len(hits) for hits in told] == [0, 1, 3, 1, 2]
        assert engine.generate_batch([], SHORT) == []

    def test_a_batch_is_checked_before_it_is_served(self, engine: Engine, texts: Texts) -> None:
        before = self._after_all_work(engine)
        with pytest.raises(PromptError, match="empty"):
            engine.generate_batch([texts.text(9), texts.text(9), ""], SHORT)
        assert self._after_all_work(engine) == before

    # Asynchronous twins

    @pytest.mark.parametrize("streamed", [False, True])
    def test_the_event_loop_goes_on_meanwhile(
        self, engine: Engine, texts: Texts, streamed: bool
    ) -> None:
        asked = texts.text(9), SamplingParams(max_tokens=100)

        async def main() -> int:
            ask = _astreamed(engine, *asked) if streamed else engine.agenerate(*asked)
            task, turns = asyncio.create_task(ask), 0
            while not task.done():
                await asyncio.sleep(0.001)
                turns += 1
            await task
            return turns

        assert asyncio.run(main()) > 20, "one turn or two, if the answer were waited for"

    def test_cancelling_a_task_stops_its_work(
        self, engine: Engine, texts: Texts, stops: None
    ) -> None:
        async def main() -> None:
            before = self.steps(engine)
            task = asyncio.create_task(engine.agenerate(texts.text(20), LONG))
            async with asyncio.timeout(PATIENCE):
                while await asyncio.to_thread(self.steps, engine) == before:
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())

    def test_leaving_an_asynchronous_stream_stops_its_work(
        self, engine: Engine, texts: Texts, stops: None
    ) -> None:
        async def main() -> None:
            deltas = engine.astream(texts.text(20), LONG)
            await anext(deltas)
            await deltas.aclose()  # type: ignore[attr-defined]

        asyncio.run(main())

    def test_many_threads_and_event_loops_at_once(self, engine: Engine, texts: Texts) -> None:
        chunks = texts.chunks(50, 40, 60)
        engine.precompute(chunks[:2], progress=False)
        engine.register(chunks)
        draws = [(), chunks[:1], chunks[1:], chunks, (), chunks[:2]]
        prompts = [texts.asking(*chosen) for chosen in draws]
        alone = [engine.generate(prompt, SHORT).token_ids for prompt in prompts]

        def ask(way: str) -> list[tuple[int, ...]]:
            return [WAYS[way](engine, prompt, SHORT).token_ids for prompt in prompts]

        others = texts.chunks(*range(40, 56))
        with ThreadPoolExecutor(len(BLENDING) + 1) as pool:
            indexed = pool.submit(engine.precompute, others, progress=False)
            assert list(pool.map(ask, BLENDING)) == [alone] * len(BLENDING)
        assert indexed.result().computed == len(others)

    # Cancelling by an event

    @pytest.mark.parametrize("way", ["generate", "stream"])
    def test_an_event_that_is_set_stops_the_work_before_it_begins(
        self, engine: Engine, texts: Texts, stops: None, way: str
    ) -> None:
        cancel = Event()
        cancel.set()
        answer = WAYS[way](engine, texts.text(20), LONG, cancel=cancel)
        assert (answer.finish_reason, answer.text, answer.token_ids) == ("cancelled", "", ())
        assert (answer.report.blended, answer.report.reason) == (False, "cancelled")
        assert (answer.report.computed_tokens, answer.report.compute_share) == (0, 0.0)

    def test_an_event_stops_the_work_meanwhile(
        self, engine: Engine, texts: Texts, stops: None
    ) -> None:
        cancel = Event()
        deltas: list[Delta] = []
        for delta in engine.stream(texts.text(20), LONG, cancel=cancel):
            deltas.append(delta)
            cancel.set()
        answer = joined(deltas)
        assert answer.finish_reason == "cancelled"
        assert 0 < len(answer.token_ids) < MANY
        said = make_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
        assert answer.text.split() == said.split()

    # Documents

    def test_what_is_registered_is_known_and_not_stored(self, engine: Engine, texts: Texts) -> None:
        document = texts.document(40, 50)
        engine.register([document, *texts.chunks(9), texts.text(8)])
        prompt = texts.asking(*document.to_chunks()).text
        told = engine.generate(prompt, SHORT).report.chunks
        assert [chunk.reason for chunk in told] == ["not stored"] * 2
        assert [chunk.document_id for chunk in told] == [document.document_id] * 2
        with pytest.raises(PromptError, match="empty"):
            engine.register([""])

    def test_a_document_is_replaced_without_computing(self, engine: Engine, texts: Texts) -> None:
        old = texts.document(50, 40)
        new = Document(old.document_id, (old.chunks[0], texts.text(45)), separator=" w77 ")
        engine.precompute([old], progress=False)
        report = engine.precompute([new, texts.text(40), " "], progress=False, register_only=True)
        assert (report.registered, report.replaced, report.computed, report.skipped) == (3, 1, 0, 0)
        assert report.refused == {"empty text": 1}
        found = engine.generate(texts.asking(*new.to_chunks()), SHORT).report.chunks
        assert [(c.hit, c.reason) for c in found] == [(True, None), (False, "not stored")]

    def test_each_chunk_is_counted_once(self, engine: Engine, texts: Texts) -> None:
        stands_alone, too_long = Chunk(texts.text(45)), texts.text(engine.context_window + 1)
        items = [texts.document(60, 50, 40), stands_alone, texts.text(42), "  \n", too_long]
        report = engine.precompute(iter(items), progress=False)
        assert (report.computed, report.computed_tokens) == (5, 60 + 50 + 40 + 45 + 42)
        assert (report.skipped, report.replaced) == (0, 0)
        assert report.refused == {"empty text": 1, "longer than the context window": 1}
        assert report.seconds > 0
        again = engine.precompute([*items, stands_alone], progress=False)
        assert (again.computed, again.computed_tokens, again.skipped) == (0, 0, 6)
        assert again.refused == report.refused
        assert engine.precompute([], progress=False).computed == 0
        report = engine.precompute(texts.chunks(40) * 2, progress=False)
        assert (report.computed, report.skipped) == (1, 1)

    def test_an_edited_document_drops_what_it_lost(self, engine: Engine, texts: Texts) -> None:
        first = texts.document(60, 50, 45)
        edited = Document(first.document_id, (first.chunks[0], texts.text(52)), separator=" w77 ")
        elsewhere = Document(first.document_id, first.chunks, " w77 ", collection="fine")
        assert engine.precompute([first], progress=False).computed == 3
        report = engine.precompute([edited], progress=False)
        assert (report.computed, report.skipped, report.replaced) == (1, 1, 2)
        gone = engine.generate(texts.asking(*first.to_chunks()), SHORT).report.chunks
        assert [chunk.hit for chunk in gone] == [True, False, False]
        beside = engine.precompute([elsewhere], progress=False)
        assert (beside.computed, beside.skipped, beside.replaced) == (2, 1, 0)

    def test_variants_of_a_document_are_side_by_side(self, engine: Engine, texts: Texts) -> None:
        first = texts.document(40, 42)
        second = texts.document(41, 43, name=first.document_id)
        assert engine.precompute([first, second], progress=False).computed == 4
        prompt = texts.asking(*first.to_chunks(), *second.to_chunks())
        assert [chunk.hit for chunk in engine.generate(prompt, SHORT).report.chunks] == [True] * 4

    def test_a_boundary_ends_what_a_chunk_knows(self, engine: Engine, texts: Texts) -> None:
        document = texts.document(50, 51, 52, boundaries=("staff", "all", "all"))
        assert engine.precompute([document], progress=False).computed == 3
        seen = Document(f"{document.document_id} alone", document.chunks[1:], document.separator)
        report = engine.precompute([seen], progress=False)
        assert (report.computed, report.skipped) == (0, 2), "nothing of staff's is in their KV"
        opened = Document(f"{document.document_id} open", document.chunks, document.separator)
        report = engine.precompute([opened], progress=False)
        assert (report.computed, report.skipped) == (2, 1), "without a boundary it is"

    def test_kv_that_another_document_shares_is_kept(self, engine: Engine, texts: Texts) -> None:
        first = texts.document(50, 45)
        second = Document(f"{first.document_id}b", (first.chunks[0], texts.text(42)), " w77 ")
        assert engine.precompute([first, second], progress=False).computed == 3
        assert engine.evict_document(first.document_id) == 1
        prompt = f"{texts.text(5)} {first.chunks[0]} {texts.text(9)}"
        found = engine.generate(prompt, SHORT).report.chunks
        assert [(c.hit, c.document_id) for c in found] == [(True, second.document_id)]

    def test_what_several_documents_hold_answers_for_none_of_them(
        self, engine: Engine, texts: Texts
    ) -> None:
        """A stranger's document must not decide what a passage of another one means."""
        opening, shared = texts.text(45), texts.text(40)
        manual = Document(texts.text(2), (opening, shared))
        uploads = [
            Document(f"{manual.document_id} {name}", (*before, shared))
            for name, before in (("b", (texts.text(42),)), ("c", (texts.text(42), opening)))
        ]
        plain = f"{texts.text(5)} {shared} {texts.text(5)}"
        whole = f"{texts.text(5)} {opening} {shared} {texts.text(5)}"

        def used(prompt: str) -> Generation:
            answer = engine.generate(prompt, LIKELY, config=REUSE)
            assert answer.report.chunks[-1].hit
            assert answer.report.recomputed_tokens == 0
            return answer

        engine.precompute([manual], progress=False)
        own, own_in_whole = used(plain), used(whole)
        for upload in uploads:
            engine.precompute([upload], progress=False)
            among_others = used(plain)
            assert distance(among_others, own) > 1e-3
            assert distance(used(whole), own_in_whole) < 1e-4, "all that stands before it is there"
            if upload is uploads[0]:
                bare = among_others
            assert distance(among_others, bare) < 1e-4, "one KV for all documents"
        for upload in uploads:
            assert distance(used(plain), bare) < 1e-4, "still several documents hold it"
            engine.evict_document(upload.document_id)
        assert distance(used(plain), own) < 1e-4
        engine.evict_document(manual.document_id)
        engine.precompute([Chunk(shared)], progress=False)
        assert distance(used(plain), bare) < 1e-4, "it is the passage's without any document"

    def test_boilerplate_has_one_copy_for_all_documents_and_is_computed_for_no_prompt(
        self, engine: Engine, texts: Texts
    ) -> None:
        footer = texts.text(43)
        documents = [Document(texts.text(2), (texts.text(42), footer)) for _ in range(6)]
        for document in documents:
            assert engine.precompute([document], progress=False).computed == 2
        prompt = f"{texts.text(5)} {footer} {texts.text(5)}"
        answer = engine.generate(prompt, SHORT, config=REUSE)
        assert (answer.report.reused_tokens, answer.report.recomputed_tokens) == (43, 0)

    def test_an_evicted_document_is_forgotten(self, engine: Engine, texts: Texts) -> None:
        document, other = texts.document(50, 40), texts.document(45)
        engine.precompute([document, other], progress=False)
        assert engine.evict_document(document.document_id) == 2
        prompt = texts.asking(*document.to_chunks(), *other.to_chunks())
        found = engine.generate(prompt.text, SHORT).report.chunks
        assert [(c.hit, c.document_id) for c in found] == [(True, other.document_id)]
        assert engine.evict_document(document.document_id) == 0
        assert engine.evict_document("no such document") == 0
        assert engine.precompute([document], progress=False).computed == 2

    def test_a_document_is_evicted_from_a_collection(self, engine: Engine, texts: Texts) -> None:
        coarse = texts.document(60, collection="coarse")
        fine = texts.document(44, 45, name=coarse.document_id, collection="fine")
        engine.precompute([coarse, fine], progress=False)
        assert engine.evict_document(fine.document_id, "none such") == 0
        assert engine.evict_document(fine.document_id, "fine") == 2
        hits = engine.generate(texts.asking(*coarse.to_chunks()), SHORT).report.chunks
        assert [chunk.hit for chunk in hits] == [True]

    @pytest.mark.parametrize("combine", ["map_reduce", "refine"])
    def test_a_long_document_is_answered_window_by_window(
        self, engine: Engine, texts: Texts, combine: Any
    ) -> None:
        document = "\n\n".join(texts.text(37) for _ in range(8))
        greedy = SamplingParams.greedy(max_tokens=6)
        asked = {"chunk_tokens": 64, "overlap": 16, "window": 3, "sampling": greedy}
        for question, computes in ((texts.text(3), True), (texts.text(3), False)):
            analysis = analyze_long_document(
                engine, document, question, combine=combine, config=REUSE, **asked
            )
            answers = list(analysis)
            report = analysis.report
            assert len(answers) == report.windows == report.chunks - 2 > 2
            assert report.computed_chunks == (report.chunks if computes else 0)
            assert report.stored_chunks == report.chunks - report.computed_chunks
            assert all(one.answer.reused_tokens > 2 * 48 for one in answers)
            assert report.answer
            assert report.prompts == report.windows + (combine == "map_reduce")

    # What goes wrong at index time, and the life of what is stored

    @pytest.fixture
    def interruptible(self) -> Iterator[None]:
        """Ctrl+C interrupts, as in a terminal; in the background, a shell has it ignored."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.usefixtures("interruptible")
    def test_an_interrupted_run_goes_on_afterwards(self, engine: Engine, texts: Texts) -> None:
        """A user presses Ctrl+C once the progress bar has moved."""
        chunks = texts.chunks(*range(40, 140))
        main = threading.main_thread().ident
        press = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))

        class Terminal(StringIO):
            def write(self, shown: str) -> int:
                if re.search(r" [1-9]\d*/", shown) and not press.ident:
                    press.start()  # not from here, since tqdm would keep its lock
                return super().write(shown)

        with redirect_stderr(Terminal()), pytest.raises(KeyboardInterrupt):
            engine.precompute(chunks)
        report = engine.precompute(chunks, progress=False)
        assert report.refused == {}
        assert report.computed + report.skipped == len(chunks)
        assert report.computed > 0, "the interrupt ended the work, too"
        assert report.skipped > 0
        answer = engine.generate(texts.asking(*chunks[:3]), SHORT)
        assert [chunk.hit for chunk in answer.report.chunks] == [True] * 3

    def test_items_that_fail_leave_an_engine_that_works(self, engine: Engine, texts: Texts) -> None:
        chunk = texts.chunks(42)[0]

        def failing() -> Iterator[Chunk]:
            yield chunk
            raise OSError("the reader broke")

        with pytest.raises(OSError, match="the reader broke"):
            engine.precompute(failing(), progress=False)
        assert engine.precompute([chunk], progress=False).computed == 1

    def test_what_is_sound_is_verified_not_computed(self, engine: Engine, texts: Texts) -> None:
        document, missing = texts.document(50, 40), texts.chunks(45)[0]
        engine.precompute([document], progress=False)
        report = engine.precompute([document, missing], progress=False, verify=True)
        assert (report.computed, report.skipped) == (1, 2)
        assert (report.refused, report.failed) == ({}, {})

    def test_a_prefetch_changes_no_answer(self, engine: Engine, texts: Texts) -> None:
        document, stranger = texts.document(50, 40), texts.chunks(45)[0]
        chunks = document.to_chunks()
        engine.precompute([document], progress=False)
        prompt = texts.asking(*chunks)
        wanted = engine.generate(prompt, SHORT).token_ids
        engine.prefetch([document.document_id, chunks[1], stranger, "no such document"])
        engine.prefetch([])
        answer = engine.generate(prompt, SHORT)
        assert answer.token_ids == wanted
        assert [chunk.hit for chunk in answer.report.chunks] == [True, True]

    def test_released_memory_is_not_needed(self, engine: Engine, texts: Texts) -> None:
        """The engine lives on: what was in memory only is a miss, and is stored anew."""
        chunks = texts.chunks(40, 50)
        engine.precompute(chunks, progress=False)
        assert engine.generate(texts.asking(*chunks), SHORT, config=REUSE).report.blended
        assert engine.release() > 0
        assert engine.release() == 0
        missed = engine.generate(texts.asking(*chunks), SHORT, config=REUSE)
        assert [chunk.reason for chunk in missed.report.chunks] == ["not stored"] * 2
        assert missed.finish_reason == "length"
        assert engine.precompute(chunks, progress=False).computed == 2
        again = engine.generate(texts.asking(*chunks), SHORT, config=REUSE)
        assert [chunk.hit for chunk in again.report.chunks] == [True, True]

    # The guard

    @pytest.fixture
    def guarded(self, engine: Engine) -> Iterator[Engine]:
        """The engine, every blended answer of which is compared; any difference is too much."""
        engine.guard = GuardConfig(sample_share=1.0, limit=1e-6, ratios=(0.5,))
        yield engine
        engine.guard = None

    def test_the_guard_raises_the_ratio_then_stops_blending(
        self, guarded: Engine, texts: Texts
    ) -> None:
        chunks = texts.chunks(60, 50)
        guarded.precompute(chunks, progress=False)
        guarded.generate_full(texts.asking(*chunks), SHORT)
        guarded.generate(texts.asking(*chunks), SHORT, config=ALL)
        wait_until(lambda: guarded.guard_report().waiting == 0)
        assert guarded.guard_report().compared == 0, "they are full prefill"
        told: list[tuple[bool, float, ReasonCode | None]] = []
        while not told or told[-1][0]:
            asked = [texts.asking(*chunks) for _ in range(8)]
            for answer in guarded.generate_batch(asked, SHORT, config=REUSE):
                report, why = answer.report, answer.report.reason or answer.report.ratio_reason
                one = report.blended, report.recompute_ratio, why.code if why else None
                told += [one] if one not in told else []
            wait_until(lambda: guarded.guard_report().waiting == 0)
            after = guarded.guard_report()
            assert after.compared < 600
        raised, stopped = ReasonCode.GUARD_RAISED, ReasonCode.GUARD_STOPPED
        assert told == [(True, 0.0, None), (True, 0.5, raised), (False, 1.0, stopped)]
        assert [chunk.reason for chunk in report.chunks] == ["stopped by the guard"] * 2
        assert (after.stopped, after.ratio, after.raised, after.lowered) == (True, 1.0, 1, 0)
        assert after.divergence is not None
        assert after.divergence > 1e-6
        guarded.reset_guard()
        assert guarded.generate(texts.asking(*chunks), SHORT).report.blended

    # Filling what was missed

    @pytest.fixture
    def filling(self, engine: Engine) -> Iterator[Engine]:
        """The engine, which fills on miss for the time of a test."""
        engine.fill_on_miss = True
        yield engine
        engine.fill_on_miss = False
        self._wait_until_filled(engine)

    @staticmethod
    def _wait_until_filled(engine: Engine) -> None:
        wait_until(lambda: engine.fill_report().waiting == 0)

    def test_what_was_missed_is_filled(self, filling: Engine, texts: Texts) -> None:
        document, before = texts.document(60, 50, 45), filling.fill_report()
        first, _, last = document.to_chunks()
        filling.register([document])
        report = filling.generate(texts.asking(last, first), SHORT).report
        assert (report.blended, report.reason) == (False, "no chunk of the prompt is stored")
        assert [chunk.reason for chunk in report.chunks] == ["not stored, being filled"] * 2
        self._wait_until_filled(filling)
        prompt = texts.asking(last, first)
        answer = filling.generate(prompt, SHORT, config=ALL)
        assert [chunk.hit for chunk in answer.report.chunks] == [True, True]
        assert answer.token_ids == filling.generate_full(prompt, SHORT).token_ids
        after = filling.fill_report()
        assert (after.computed - before.computed, after.dropped) == (2, before.dropped)
        assert after.computed_tokens - before.computed_tokens == 105
        done = filling.precompute([document], progress=False)
        assert (done.computed, done.skipped) == (1, 2), "what was filled is what is precomputed"

    def test_what_many_requests_missed_is_filled_once(self, filling: Engine, texts: Texts) -> None:
        chunks, before = texts.chunks(60, 50, 45), filling.fill_report()
        filling.register(chunks)
        filling.generate_batch([texts.asking(*chunks) for _ in range(4)], SHORT)
        self._wait_until_filled(filling)
        report = filling.generate(texts.asking(*chunks), SHORT).report
        assert [chunk.hit for chunk in report.chunks] == [True] * 3
        assert filling.fill_report().computed - before.computed == 3

    def test_what_is_too_little_to_blend_is_filled_up(self, filling: Engine, texts: Texts) -> None:
        stored, missing = texts.chunks(40, 60)
        filling.precompute([stored], progress=False)
        filling.register([missing])
        config = CONFIG.with_changes(min_tokens=80)
        report = filling.generate(texts.asking(stored, missing), SHORT, config=config).report
        assert [c.reason for c in report.chunks] == ["too short", "not stored, being filled"]
        self._wait_until_filled(filling)
        report = filling.generate(texts.asking(stored, missing), SHORT, config=config).report
        assert [chunk.hit for chunk in report.chunks] == [True, True]

    def test_what_nobody_reused_or_still_has_is_not_filled(
        self, filling: Engine, texts: Texts
    ) -> None:
        asked_in_full, gone = texts.document(50), texts.document(60)
        filling.register([asked_in_full, gone])
        before = filling.fill_report()
        filling.generate_full(texts.asking(*asked_in_full.to_chunks()), SHORT)
        cancel = Event()
        cancel.set()
        filling.generate(texts.asking(*asked_in_full.to_chunks()), SHORT, cancel=cancel)
        self._wait_until_filled(filling)
        assert filling.fill_report().computed == before.computed
        filling.generate(texts.asking(*gone.to_chunks()), SHORT)
        filling.evict_document(gone.document_id)
        self._wait_until_filled(filling)
        filling.fill_on_miss = False
        filling.register([gone])
        for document in (asked_in_full, gone):
            [chunk] = filling.generate(texts.asking(*document.to_chunks()), SHORT).report.chunks
            assert (chunk.hit, chunk.reason) == (False, "not stored")

    # Refusals and the end

    @pytest.mark.parametrize("way", WAYS)
    def test_prompts_that_cannot_be_served_are_refused(self, engine: Engine, way: str) -> None:
        window = engine.context_window
        for prompt, message in (
            ("", "prompt is empty: give at least one token"),
            (BlendPrompt.of(), "prompt is empty"),
            (words(window, 1), f"holds {window} tokens, the context window is {window}: "),
            ("w5 \ud800", "surrogate"),
            ([{"content": "no role"}], "role"),
        ):
            with pytest.raises(PromptError, match=message) as caught:
                WAYS[way](engine, prompt, SHORT)
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("way", BLENDING)
    def test_a_config_that_is_wrong_is_refused(self, engine: Engine, way: str) -> None:
        for fields in ({"selector": "nonsense"}, {"selector_options": {"nonsense": 1}}):
            with pytest.raises(ConfigError, match="nonsense") as caught:
                WAYS[way](engine, "w5 w6", SHORT, config=CONFIG.with_changes(**fields))
            assert "\n" not in str(caught.value)

    def test_closing_ends_all_work_and_what_follows(self, engine: Engine, texts: Texts) -> None:
        """Last: it closes the engine that the others share."""
        stream = engine.stream(texts.text(20), LONG)
        next(stream)
        asked = 40

        async def main() -> list[Any]:
            """More at once than any pool has threads."""
            streams = [engine.astream(texts.text(20), LONG) for _ in range(3)]
            for one in streams:
                await anext(one)
            tasks = [
                asyncio.create_task(engine.agenerate(texts.text(20), LONG)) for _ in range(asked)
            ]
            await asyncio.sleep(0)
            await asyncio.to_thread(engine.close)
            return await asyncio.gather(*tasks, *map(read, streams), return_exceptions=True)

        for error in asyncio.run(main()):
            assert isinstance(error, ConfigError)
            assert str(error) == CLOSED
        with pytest.raises(ConfigError, match=CLOSED):
            list(stream)
        assert not engine.is_open
        engine.close()
        calls: list[Callable[[], object]] = [
            *(partial(way, engine, "w1", SHORT) for way in WAYS.values()),
            lambda: engine.precompute(["w1"], progress=False),
            lambda: engine.register(["w1"]),
            lambda: engine.prefetch(["any"]),
            lambda: engine.evict_document("any"),
            engine.release,
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=CLOSED):
                call()


def joined(deltas: Iterable[Delta]) -> Generation:
    """The answer that a stream ends with, whose text its pieces are."""
    deltas = list(deltas)
    answer = deltas[-1].generation
    assert answer is not None
    assert "".join(delta.text for delta in deltas) == answer.text
    return answer


def distance(one: Generation, other: Generation) -> float:
    """Largest difference of the first token's log-probabilities; infinite if they share none."""
    here, there = ({token: value for token, _, value in each.logprobs[0].top}
                   for each in (one, other))  # fmt: skip
    shared = here.keys() & there.keys()
    return max((abs(here[token] - there[token]) for token in shared), default=math.inf)


async def read(deltas: AsyncIterable[Delta]) -> None:
    async for _ in deltas:
        pass


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def embedded_model() -> PreTrainedModel:
    """Return a tiny model whose window is WINDOW."""
    model = make_model("llama")
    model.config.max_position_embeddings = WINDOW
    return model


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[list[int]]:
    """Yield how often the model has embedded tokens, in a list: at least once a step."""
    calls, counted = [0], count(1)

    def note(*_: object) -> None:
        calls[0] = next(counted)

    hook = model.get_input_embeddings().register_forward_pre_hook(note)
    yield calls
    hook.remove()


class EmbeddedContract(EngineContract):
    """Held by engines around an embedded model, whose steps are counted."""

    @pytest.fixture(autouse=True)
    def _count(self, calls: list[int]) -> None:
        self._calls = calls

    def steps(self, engine: object) -> int:
        return self._calls[0]
