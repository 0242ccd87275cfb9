"""The engine as its users meet it: answers, reports, streams, threads, limits."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Chunk,
    Document,
    SamplingParams,
    TieredKVStore,
    TransformersEngine,
)
from cacheblend_rag.engines.answer import Delta, Request
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.stream import Cancellation, Stream
from cacheblend_rag.errors import ConfigError, PromptError, StoreError
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry
from tests.engines.transformers.conftest import EngineFactory
from tests.models import make_model, words

CHUNKS = [Chunk(words(30, seed)) for seed in range(4)]
QUESTION = words(6, 99)
TEXT = "\n\n".join([words(3, 98), *(c.text for c in CHUNKS), QUESTION])
SHORT = SamplingParams(max_tokens=6)


def test_the_report_adds_up(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.2)
    engine.precompute(CHUNKS[:3], progress=False)
    engine.register(CHUNKS[3:])
    report = engine.generate(TEXT, SHORT).report
    assert report.blended
    assert report.reason is None
    assert [c.hit for c in report.chunks] == [True, True, True, False]
    assert report.chunks[3].reason == "not stored"
    assert [c.tier for c in report.chunks] == ["host", "host", "host", None]
    assert [c.start for c in report.chunks] == [3, 33, 63, 93]
    assert report.prompt_tokens == 3 + 4 * 30 + 6
    assert report.recomputed_tokens == 18
    assert report.reused_tokens == 90 - 18
    assert report.computed_tokens == 3 + 30 + 6
    assert sum(c.recomputed for c in report.chunks) == 18
    assert 0 < report.compute_share < 0.8
    assert report.recompute_ratio == 0.2
    assert report.seconds.time_to_first_token > 0
    assert report.to_dict()["seconds"]["time_to_first_token"] > 0


def test_the_engine_keeps_the_protocol(make_engine: EngineFactory) -> None:
    engine: Engine = make_engine()
    wanted = {name for name in vars(Engine) if not name.startswith("_")}
    assert all(hasattr(engine, name) for name in wanted)


def test_text_segments_messages_and_parts_are_the_same_prompt(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.0)
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine.precompute(CHUNKS, progress=False)
    parts = BlendPrompt.from_text(TEXT, engine.registry)
    answers = [
        engine.generate(prompt, SHORT)
        for prompt in (TEXT, parts, [{"role": "user", "content": TEXT}])
    ]
    assert len({a.token_ids for a in answers}) == 1
    assert all(a.report.reused_tokens == 120 for a in answers)


def test_stream_pieces_join_to_the_answer(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)
    deltas = list(engine.stream(TEXT, SHORT))
    final = deltas[-1].generation
    assert final is not None
    assert all(d.generation is None for d in deltas[:-1])
    assert "".join(d.text for d in deltas) == final.text
    assert final == final.__class__(**{**vars(final)})
    assert final.token_ids == engine.generate(TEXT, SHORT).token_ids
    assert len(final.token_ids) == 6
    assert final.finish_reason == "length"


def test_stop_strings_end_and_are_cut_from_the_answer(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)
    whole = engine.generate(TEXT, SHORT).text
    stop = whole.split()[3]
    stopped = engine.generate(TEXT, SamplingParams(max_tokens=6, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index(stop)]
    streamed = "".join(d.text for d in engine.stream(TEXT, SamplingParams(6, stop=(stop,))))
    assert streamed == stopped.text


def test_an_end_token_ends_the_answer_unless_ignored(make_engine: EngineFactory) -> None:
    engine = make_engine()
    first = engine.generate(TEXT, SHORT).token_ids[2]
    engine._eos = frozenset({first})
    ended = engine.generate(TEXT, SHORT)
    assert ended.finish_reason == "stop"
    assert first not in ended.token_ids
    assert len(engine.generate(TEXT, SamplingParams(6, ignore_eos=True)).token_ids) == 6


def test_seeds_decide_what_is_drawn(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)

    def draw(seed: int, **more: float) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=12, temperature=1.5, seed=seed, **more)
        return engine.generate(TEXT, sampling).token_ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    greedy = engine.generate(TEXT, SamplingParams(max_tokens=12)).token_ids
    assert draw(3, top_k=1) == greedy
    assert draw(3, top_p=1e-9) == greedy


def test_a_repetition_penalty_reaches_the_prompt_too(make_engine: EngineFactory) -> None:
    engine = make_engine()
    seen = set(engine.tokenizer(TEXT)["input_ids"])
    strong = SamplingParams(max_tokens=12, repetition_penalty=1e6)
    drawn = engine.generate(TEXT, strong).token_ids
    assert len(set(drawn)) == 12
    assert not seen & set(drawn)


def test_cancelling_stops_the_work(make_engine: EngineFactory) -> None:
    engine = make_engine()
    cancel = threading.Event()
    cancel.set()
    nothing = engine.generate(TEXT, SHORT, cancel=cancel)
    assert (nothing.finish_reason, nothing.text) == ("cancelled", "")
    assert nothing.report.reason == "cancelled"
    cancel.clear()
    received = []
    for delta in engine.stream(TEXT, SamplingParams(max_tokens=50), cancel=cancel):
        received.append(delta)
        cancel.set()
    final = received[-1].generation
    assert final is not None
    assert final.finish_reason == "cancelled"
    assert len(final.token_ids) < 5


def test_a_batch_answers_in_order(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)
    prompts = [TEXT, f"{CHUNKS[1].text} {QUESTION}", "w5 w6 w7"]
    batch = engine.generate_batch(prompts, SHORT)
    assert [g.token_ids for g in batch] == [engine.generate(p, SHORT).token_ids for p in prompts]


def test_threads_do_not_disturb_each_other(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.3)
    engine.precompute(CHUNKS, progress=False)
    prompts = [f"{CHUNKS[i % 4].text}\n{CHUNKS[(i + 1) % 4].text}\n{words(5, i)}" for i in range(8)]
    alone = [engine.generate(p, SHORT).token_ids for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: engine.generate(p, SHORT).token_ids, prompts))
    assert together == alone


def test_async_twins_answer_alike_and_leave_the_loop_free(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)
    wanted = engine.generate(TEXT, SHORT)

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        answers = await asyncio.gather(*(engine.agenerate(TEXT, SHORT) for _ in range(8)))
        assert {a.token_ids for a in answers} == {wanted.token_ids}
        pieces = [delta async for delta in engine.astream(TEXT, SHORT)]
        assert "".join(p.text for p in pieces) == wanted.text
        assert ticks > 8
        ticking.cancel()
        with pytest.raises(PromptError):
            await engine.agenerate("")
        with pytest.raises(PromptError):
            async for _ in engine.astream(""):
                pass

    asyncio.run(main())


def test_cancelling_a_task_stops_its_work(make_engine: EngineFactory) -> None:
    engine = make_engine()
    seen: list[Cancellation] = []
    inner = engine._start

    def watched(request: Request) -> Stream[Delta]:
        seen.append(request.cancel)
        return inner(request)

    engine._start = watched

    async def main() -> None:
        task = asyncio.create_task(engine.agenerate(TEXT, SamplingParams(max_tokens=4000)))
        while not seen:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen[0].is_set()
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "prompt is empty"), (words(16385, 1), "16385 tokens, the context window is 16384")],
)
def test_prompts_that_cannot_be_served_are_refused(
    make_engine: EngineFactory, prompt: str, message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        make_engine().generate(prompt)


def test_an_empty_prompt_is_refused_even_where_a_bos_token_is_added(
    make_engine: EngineFactory,
) -> None:
    engine = make_engine()
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    engine = TransformersEngine(engine.model, tokenizer=tokenizer)
    assert engine.generate("w5 w6", SHORT).prompt_tokens == 3
    with pytest.raises(PromptError, match="prompt is empty"):
        engine.generate("")


def test_answers_longer_than_the_reserved_room_go_on(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=1.0)
    engine.precompute(CHUNKS, progress=False)
    long = SamplingParams(max_tokens=300)
    blended, full = engine.generate(TEXT, long), engine.generate_full(TEXT, long)
    assert len(blended.token_ids) == 300
    assert blended.token_ids == full.token_ids


def test_engines_around_one_model_take_turns(make_engine: EngineFactory) -> None:
    engines = [make_engine(lead_in=name, recompute_ratio=0.3) for name in ("none", "document")]
    for engine in engines:
        engine.precompute(CHUNKS, progress=False)
    alone = [engine.generate(TEXT, SHORT).token_ids for engine in engines] * 4
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda e: e.generate(TEXT, SHORT).token_ids, engines * 4))
    assert together == alone


def test_an_answer_ends_at_the_context_window(make_engine: EngineFactory) -> None:
    small = make_model("llama")
    small.config.max_position_embeddings = 64
    engine = make_engine(with_model=small, recompute_ratio=0.0)
    assert engine.context_window == 64
    answer = engine.generate(words(60, 1), SamplingParams(max_tokens=100))
    assert len(answer.token_ids) == 4
    assert answer.finish_reason == "length"
    report = engine.precompute([words(70, 1), words(10, 2), "  "], progress=False)
    assert report.refused == {"longer than the context window": 1, "empty text": 1}
    assert report.computed == 1


def test_too_few_reusable_tokens_are_not_worth_blending(make_engine: EngineFactory) -> None:
    engine = make_engine(min_tokens=121)
    engine.precompute(CHUNKS, progress=False)
    report = engine.generate(TEXT, SHORT).report
    assert not report.blended
    assert report.reason == "120 reusable tokens are fewer than min_tokens=121"
    assert {c.reason for c in report.chunks} == {"too short"}
    enough = engine.generate(TEXT, SHORT, config=BlendConfig(min_tokens=120, selector="random"))
    assert enough.report.blended


def test_hints_that_do_not_stand_in_the_prompt_are_reported(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)
    altered = f"{CHUNKS[0].text[:-4]} {CHUNKS[1].text} {QUESTION}"
    stranger = Chunk("never registered")
    report = engine.generate(altered, SHORT, hints=[*CHUNKS[:2], stranger]).report
    assert [(c.hit, c.reason) for c in report.chunks] == [
        (True, None),
        (False, "altered text"),
        (False, "unknown"),
    ]


def test_a_prompt_ending_in_a_chunk_still_yields_its_own_logits(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.0, lead_in="none")
    engine.precompute(CHUNKS[:1], progress=False)
    answer = engine.generate(CHUNKS[0].text, SHORT)
    assert answer.report.recomputed_tokens == 1
    assert answer.token_ids == engine.generate_full(CHUNKS[0].text, SHORT).token_ids


@pytest.mark.parametrize(
    "arguments", [{"check_layers": (9,), "selector": "hkvd"}, {"selector": "nonsense"}]
)
def test_a_config_that_does_not_suit_the_model_is_refused(
    make_engine: EngineFactory, arguments: dict
) -> None:
    with pytest.raises(ConfigError):
        make_engine(**arguments)
    with pytest.raises(ConfigError):
        make_engine().generate(TEXT, config=BlendConfig(**arguments))


def test_full_prefill_reports_no_reuse(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS, progress=False)
    report = engine.generate_full(TEXT, SHORT).report
    assert not report.blended
    assert report.reason == "full prefill was asked for"
    assert report.computed_tokens == report.prompt_tokens
    assert report.compute_share == 1.0


def test_a_selector_without_its_prior_falls_back_and_says_so(make_engine: EngineFactory) -> None:
    engine = make_engine(selector="prior")
    engine.precompute(CHUNKS, progress=False)
    report = engine.generate(TEXT, SHORT).report
    assert report.selector == "chunk_head"
    assert report.selector_reason == "no prior stored for prior"
    assert report.recomputed_tokens == 20


@pytest.mark.parametrize("selector", ["question", "question_prior", "hkvd", "chunk_head"])
def test_each_selector_recomputes_its_share(make_engine: EngineFactory, selector: str) -> None:
    from cacheblend_rag import Document

    engine = make_engine(selector=selector, recompute_ratio=0.1, protect_context=False)
    engine.precompute([Document("d", tuple(c.text for c in CHUNKS))], progress=False)
    report = engine.generate(TEXT, SHORT).report
    assert (report.selector, report.selector_reason) == (selector, None)
    assert report.recomputed_tokens == 12


def test_namespaces_do_not_share_kv(make_engine: EngineFactory) -> None:
    store = TieredKVStore.open()
    ours, theirs = (make_engine(store=store, namespace=n) for n in ("ours", "theirs"))
    ours.precompute(CHUNKS, progress=False)
    theirs.register(CHUNKS)
    assert ours.generate(TEXT, SHORT).report.blended
    report = theirs.generate(TEXT, SHORT).report
    assert not report.blended
    assert {c.reason for c in report.chunks} == {"not stored"}


def test_kv_of_another_lead_in_is_a_miss_with_that_reason(make_engine: EngineFactory) -> None:
    store = TieredKVStore.open()
    make_engine(store=store, lead_in="bos").precompute(CHUNKS[:2], progress=False)
    other = make_engine(store=store, lead_in="instruction")
    other.register(CHUNKS)
    reasons = [c.reason for c in other.generate(TEXT, SHORT).report.chunks]
    assert reasons == ["other model", "other model", "not stored", "not stored"]


def test_a_closed_engine_says_so_whatever_it_is_asked(make_engine: EngineFactory) -> None:
    engine = make_engine(store=TieredKVStore.open())
    assert engine.is_open
    engine.close()
    assert not engine.is_open

    async def last(deltas: AsyncIterator[Delta]) -> None:
        async for _ in deltas:
            pass

    calls: list[Callable[[], object]] = [
        lambda: engine.generate("w1"),
        lambda: engine.generate_full("w1"),
        lambda: list(engine.stream("w1")),
        lambda: engine.generate_batch(["w1"]),
        lambda: asyncio.run(engine.agenerate("w1")),
        lambda: asyncio.run(last(engine.astream("w1"))),
        lambda: engine.precompute(["w1"], progress=False),
        lambda: engine.register(["w1"]),
        lambda: engine.prefetch(["any"]),
        lambda: engine.evict_document("any"),
        engine.evict_unregistered,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="the engine is closed: open another"):
            call()


def test_the_baseline_is_of_the_same_tokens_whatever_is_hinted(make_engine: EngineFactory) -> None:
    """Hints decide which of two overlapping chunks a prompt is cut at, hence its tokens."""
    engine = make_engine()
    engine.precompute(["w1 w2 w3 w4", "w3 w4 w5"], progress=False)
    for hints in ([], [Chunk("w3 w4 w5")]):
        here = engine.prepare("w1 w2 w3 w4 w5 w6", hints)
        full = engine.generate_full("w1 w2 w3 w4 w5 w6", SamplingParams(max_tokens=1), hints=hints)
        spans = [(span.chunk.text, span.start) for span in here.encoded.spans]
        assert spans == ([("w3 w4 w5", 2)] if hints else [("w1 w2 w3 w4", 0)])
        assert full.prompt_tokens == len(here.token_ids)


def test_a_full_disk_does_not_keep_a_document(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry needs room to forget, so KV goes before it."""
    registry = SharedChunkRegistry(tmp_path / "registry.sqlite")
    store = TieredKVStore.open(host_bytes=0, disk_path=tmp_path)
    engine = make_engine(store=store, registry=registry)
    engine.precompute([Document("report", ("w1 w2", "w3 w4"))], progress=False)
    discard = registry.discard_many

    def full_while_there_is_kv(chunks: Iterable[Chunk]) -> None:
        if store.keys():
            raise StoreError("database or disk is full")
        discard(chunks)

    monkeypatch.setattr(registry, "discard_many", full_while_there_is_kv)
    assert engine.evict_document("report") == 2
    assert len(registry) == 0


LEAVING = """
import sys, threading, time
from tests.models import make_model, make_tokenizer
from cacheblend_rag import SamplingParams, TransformersEngine
engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer())
def work(seed):
    while True:
        engine.precompute([f"w{n % 200} w{seed}" for n in range(seed, seed + 40)], progress=False)
        engine.generate(f"w{seed} w2 w3", SamplingParams(max_tokens=20, ignore_eos=True))
for seed in range(4):
    threading.Thread(target=work, args=(seed,), daemon=True).start()
time.sleep(float(sys.argv[1]))
print("leaving")
"""


@pytest.mark.parametrize("seconds", [0.3, 0.5, 0.7])
def test_the_interpreter_may_end_while_threads_compute(seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, str(seconds)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr[-500:]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", "5", "must be a whole number"),
        ("max_tokens", 2.5, "must be a whole number"),
        ("max_tokens", True, "must be a whole number"),
        ("temperature", "hot", "must be a number"),
        ("temperature", float("nan"), "must be a number"),
        ("top_k", 1.5, "must be a whole number"),
        ("seed", 1.5, "must be a whole number"),
        ("stop", 3, "must hold non-empty strings"),
        ("stop", [""], "must hold non-empty strings"),
        ("repetition_penalty", 0, "must be above 0"),
    ],
)
def test_sampling_of_the_wrong_kind_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=.* {message}"):
        SamplingParams(**{field: value})
