"""The engine as its users meet it: answers, reports, streams, threads, limits."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Iterable
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
from cacheblend_rag.errors import ConfigError, PromptError, StoreError
from cacheblend_rag.report import PREFILL_PHASES
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


def test_every_phase_of_a_blended_answer_is_timed(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.2, selector="hkvd")
    engine.precompute(CHUNKS, progress=False)
    report = engine.generate(TEXT, SHORT).report
    assert report.blended
    starts = [getattr(report.starts, phase) for phase in PREFILL_PHASES]
    assert None not in starts
    assert min(getattr(report.seconds, phase) for phase in PREFILL_PHASES) > 0
    early, selected, rest = starts[5:8]
    assert early < selected < rest < report.starts.first_token
    assert set(report.seconds.load_by_tier) == {"host"}


def test_asking_the_store_in_vain_is_part_of_the_time_to_the_first_token(
    make_engine: EngineFactory,
) -> None:
    engine = make_engine()
    engine.register(CHUNKS)
    report = engine.generate(TEXT, SHORT).report
    assert not report.blended
    assert report.seconds.look_up > 0
    assert report.starts.look_up is not None
    assert report.seconds.recompute > 0
    assert (report.seconds.load, report.seconds.load_by_tier) == (0, {})
    full = engine.generate_full(TEXT, SHORT).report
    assert (full.seconds.look_up, full.starts.look_up) == (0, None)


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


def test_an_end_token_ends_the_answer_unless_ignored(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    first = engine.generate(TEXT, SHORT).token_ids[2]
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [first])
    engine = make_engine()
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


def test_a_selector_without_its_prior_falls_back_and_says_so(make_engine: EngineFactory) -> None:
    engine = make_engine(selector="prior", recompute_ratio=0.16)
    engine.precompute(CHUNKS, progress=False)
    report = engine.generate(TEXT, SHORT).report
    assert report.selector == "chunk_head"
    assert report.selector_reason == "no prior stored for prior"
    assert report.recomputed_tokens == 20


@pytest.mark.parametrize("selector", ["question_mid", "hkvd", "chunk_head"])
def test_each_selector_recomputes_its_share(make_engine: EngineFactory, selector: str) -> None:
    from cacheblend_rag import Document

    engine = make_engine(selector=selector, recompute_ratio=0.1, protect_context=0.0)
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


def test_a_full_disk_does_not_keep_a_document(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry needs room to forget, so KV goes before it."""
    registry = SharedChunkRegistry(tmp_path / "registry.sqlite")
    store = TieredKVStore.open(host_bytes=0, kv_path=tmp_path)
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
        ("max_tokens", 0, "must be at least 1"),
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
