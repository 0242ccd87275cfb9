"""Each scenario of the guides holds by its outcome, on the embedded engine over a random model."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from transformers import AutoModelForCausalLM, LlamaConfig

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    BlendReport,
    Chunk,
    Conversation,
    Document,
    Engine,
    EngineMetrics,
    GuardConfig,
    ReasonCode,
    SamplingParams,
    analyze_long_document,
    diagnose,
    open_engine,
)
from tests.contracts.engine import distance
from tests.local_servers import HOST, Server, redis_server, redis_url, s3_server, s3_url
from tests.models import make_model, make_tokenizer, prompt_of, save_model, words

SHORT = SamplingParams.greedy(max_tokens=4, ignore_eos=True)
ONE = SamplingParams.greedy(max_tokens=1)
LIKELY = SamplingParams.greedy(max_tokens=1, logprobs=20)
TOKENS = 64
"""Of a chunk."""
PATIENCE = 60.0
OF_TIMES = {"machine_busy", "tier_slow", "prefill_sooner"}
"""Findings that depend on how busy the machine is."""
MODEL, TOKENIZER = make_model(), make_tokenizer()
Open = Callable[..., Engine]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open engines around one model, each with a store of its own; closed in the end."""
    engines: list[Engine] = []

    def open_one(blend: dict[str, Any] | None = None, **options: Any) -> Engine:
        config = BlendConfig(**{"min_tokens": 16, "cost_model": False, **(blend or {})})
        given = {"model": MODEL, "tokenizer": TOKENIZER, "config": config, **options}
        engines.append(open_engine("transformers", **given))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        yield server


def chunks_of(*seeds: int) -> list[Chunk]:
    return [Chunk(words(TOKENS, seed)) for seed in seeds]


def asking(*chunks: Chunk, question: str = "w9 w10") -> BlendPrompt:
    return prompt_of("w5 w6", *chunks, question)


def ask(engine: Engine, *chunks: Chunk, **blend: Any) -> BlendReport:
    config = engine.config.with_changes(**blend)
    return engine.generate(asking(*chunks), SHORT, config=config).report


def tiers(report: BlendReport) -> list[str | None]:
    return [chunk.tier if chunk.hit else None for chunk in report.chunks]


def until(is_met: Callable[[], Any]) -> bool:
    end = time.monotonic() + PATIENCE
    while not is_met() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(is_met())


def gauge(metrics: EngineMetrics, name: str, tier: str) -> float:
    return metrics.registry.get_sample_value(f"cacheblend_tier_{name}", {"tier": tier}) or 0.0


def command_line(folder: Path, command: str) -> Any:
    """Return what a command prints in a folder, with ``--json``."""
    done = subprocess.run(
        [sys.executable, "-m", "cacheblend_rag", *command.split(), "--json"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# Tuning


def test_tune_writes_the_cheapest_settings_that_keep_the_quality_as_a_profile(
    opened: Open, tmp_path: Path
) -> None:
    """Prompts are long enough that a tenth of their tokens is computed sooner than all."""
    save_model("llama", tmp_path / "model", 16)
    TOKENIZER.save_pretrained(tmp_path / "model")
    contexts = [{"title": "", "text": words(700, seed)} for seed in range(4)]
    data = [{"question": words(4, at), "answers": ["w7"], "ctxs": contexts} for at in (50, 51)]
    (tmp_path / "questions.json").write_text(json.dumps(data))
    options = "--bar fidelity=0.5 --set kind=none --rules hkvd=0.1,hkvd=0.9"
    told = command_line(tmp_path, f"tune model --dataset questions.json {options} --out mine.toml")
    quality = {one["ratio"]: one["quality"] for one in told["candidates"]}
    assert 0.5 < quality[0.1] < quality[0.9] < 1
    tuned = open_engine(
        "transformers", model=MODEL, tokenizer=TOKENIZER, profile=tmp_path / "mine.toml"
    )
    assert (tuned.config.selector, tuned.config.recompute_ratio) == ("hkvd", 0.1)
    assert tuned.lead_in.kind == "none"


@pytest.mark.parametrize(
    ("blend", "shares"),
    [
        ({"selector": "none", "recompute_ratio": 0.0}, [0, 0, 0, 0]),
        ({"selector": "hkvd", "recompute_ratio": 0.25}, [1, 1, 0.25, 0.25]),
        ({"selector": "hkvd", "recompute_ratio": 0.25, "check_layers": [2]}, [1, 1, 1, 0.25]),
        (
            {"selector": "hkvd", "check_layers": [1, 2], "recompute_ratio": [0.5, 0.25]},
            [1, 1, 0.5, 0.25],
        ),
    ],
    ids=["none", "default", "late", "several"],
)
def test_check_layers_say_how_many_tokens_each_layer_computes(
    opened: Open, blend: dict[str, Any], shares: list[float]
) -> None:
    engine, chunks = opened(), chunks_of(1, 2, 3)
    engine.precompute(chunks, progress=False)
    report = ask(engine, *chunks, **blend, trace=True)
    count = 3 * TOKENS
    assert report.trace is not None
    assert report.trace.rows == tuple(int(share * count) for share in shares)
    assert report.recomputed_tokens == shares[-1] * count


# Storage


def test_what_redis_lost_comes_from_s3_and_returns_with_its_time_to_live(
    opened: Open, redis: Server, s3: Server
) -> None:
    places = ["host://", redis_url(redis, "ttl=1h"), s3_url(s3, "fall")]
    chunks, there = chunks_of(1, 2), Redis(HOST, redis.port)
    opened(tiers=places).precompute(chunks, progress=False)
    there.flushall()
    for tier in ("s3", "redis"):
        server = opened(tiers=places)
        server.register(chunks)
        assert tiers(ask(server, *chunks)) == [tier, tier]
        assert tiers(ask(server, *chunks)) == ["host", "host"]
        assert until(lambda: sum(3500 < there.ttl(key) <= 3600 for key in there.scan_iter()) == 2)


def test_what_is_on_disk_is_found_prefetched_and_read_again_after_a_release(
    opened: Open, tmp_path: Path
) -> None:
    report = Document("report", tuple(words(TOKENS, seed) for seed in (1, 2)))
    opened(kv_path=tmp_path).precompute([report], progress=False)
    engine, chunks = opened(kv_path=tmp_path), report.to_chunks()
    metrics = EngineMetrics(engine)
    assert tiers(ask(engine, *chunks)) == ["disk", "disk"]
    for tier in ("host", "disk"):
        engine.release()
        assert gauge(metrics, "entries", "host") == 0
        if tier == "host":
            engine.prefetch(["report"])
            assert until(lambda: gauge(metrics, "entries", "host") == 2)
        assert tiers(ask(engine, *chunks)) == [tier, tier]
    foreign = ask(opened(kv_path=tmp_path, precision="fp8"), *chunks)
    assert [chunk.reason_code for chunk in foreign.chunks] == [ReasonCode.OTHER_MODEL] * 2


@pytest.mark.parametrize("host", [[], ["host://"]], ids=["no host tier", "host tier"])
def test_a_batch_reads_what_its_prompts_share_once(
    opened: Open, redis: Server, host: list[str]
) -> None:
    """Of two topics in turn, so that only an order by overlap reads each topic's chunk once.

    Without memory a chunk is read again if a prompt ended before the next one of its topic began.
    """
    topics, own = chunks_of(1, 2), chunks_of(*range(10, 26))
    places, there = [*host, redis_url(redis, "prefix=batch:")], Redis(HOST, redis.port)
    opened(tiers=places).precompute([*topics, *own], progress=False)
    engine = opened({"recompute_ratio": 0.0, "reuse_prefix": False}, tiers=places)
    engine.register([*topics, *own])

    def sizes_asked() -> int:
        return int(there.info("commandstats")["cmdstat_strlen"]["calls"])

    before = sizes_asked()  # once for each chunk that is read
    prompts = [asking(topics[at % 2], chunk) for at, chunk in enumerate(own)]
    answers = engine.generate_batch(prompts, ONE)
    assert all(chunk.hit for answer in answers for chunk in answer.report.chunks)
    least = len(topics) + len(own)
    assert least <= sizes_asked() - before <= least + (0 if host else 3)


@pytest.mark.parametrize(("admit", "lost"), [("always", 1), ("frequency", 3)])
def test_memory_is_bounded_and_drops_what_was_asked_for_longest_ago_or_least(
    opened: Open, admit: str, lost: int
) -> None:
    one, chunks = opened(), chunks_of(1, 2, 3, 4)
    one.precompute(chunks[:1], progress=False)
    bound = int(3.5 * gauge(EngineMetrics(one), "bytes", "host"))
    engine = opened(tiers=[f"host://?capacity={bound}&admit={admit}"])
    engine.precompute(chunks[:3], progress=False)
    for at in (1, 2, 0) * 3:
        assert tiers(ask(engine, chunks[at])) == ["host"]
    engine.precompute(chunks[3:], progress=False)
    assert 0 < gauge(EngineMetrics(engine), "bytes", "host") <= bound
    found = [tiers(ask(engine, chunk))[0] for chunk in chunks]
    assert found == [None if at == lost else "host" for at in range(4)]


@pytest.mark.parametrize(("rounded", "least", "most"), [("fp8", 0.25, 0.3), ("int4", 0.13, 0.25)])
def test_rounded_kv_takes_a_fraction_of_float32_and_leaves_ratio_1_exact(
    opened: Open, tmp_path: Path, rounded: str, least: float, most: float
) -> None:
    sizes, likely, chunks = {}, {}, chunks_of(1, 2)
    for precision in ("native", rounded):
        engine = opened(kv_path=tmp_path / precision, precision=precision)
        engine.precompute(chunks, progress=False)
        sizes[precision] = gauge(EngineMetrics(engine), "bytes", "disk")
        reuse = engine.config.with_changes(recompute_ratio=0.0)
        likely[precision] = engine.generate(asking(*chunks), LIKELY, config=reuse)
        assert likely[precision].report.reused_tokens == 2 * TOKENS
    assert least < sizes[rounded] / sizes["native"] < most
    full = engine.generate_full(asking(*chunks), LIKELY)
    assert distance(likely[rounded], likely["native"]) < distance(full, likely["native"]) / 2
    all_of_it = engine.config.with_changes(recompute_ratio=1.0)
    answer = engine.generate(asking(*chunks), SHORT, config=all_of_it)
    assert answer.report.recomputed_tokens == 2 * TOKENS
    assert answer.token_ids == engine.generate_full(asking(*chunks), SHORT).token_ids


# Troubleshooting


def test_the_time_to_the_first_token_is_the_sum_of_its_phases(opened: Open, tmp_path: Path) -> None:
    chunks = chunks_of(1, 2, 3)
    opened(kv_path=tmp_path).precompute(chunks, progress=False)
    report = ask(opened(kv_path=tmp_path), *chunks, selector="hkvd")
    seconds, starts = report.seconds, report.starts
    phases = [phase.name for phase in fields(starts)]
    begun = [getattr(starts, phase) for phase in phases]
    assert None not in begun, "each phase of a blend from a disk took place"
    assert begun[0] == min(begun)
    assert (phases[-1], begun[-1]) == ("decode", max(begun))
    assert seconds.time_to_first_token == pytest.approx(
        sum(getattr(seconds, phase) for phase in phases[:-1])
    )
    assert set(seconds.load_by_tier) <= {"disk"}


def test_debug_lines_tell_the_choice_and_the_request_without_text(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine, chunks = opened(), chunks_of(1, 2, 3)
    engine.precompute(chunks, progress=False)
    with caplog.at_level(logging.DEBUG, "cacheblend_rag"):
        report = ask(engine, *chunks, selector="hkvd", recompute_ratio=0.25)
    said = [line for line in caplog.messages if report.request_id in line]
    assert any("layer 1: 48 of 192 tokens chosen, deviation" in line for line in said)
    assert any(
        "144 tokens reused, 48 recomputed, 4 computed; 3 of 3 chunks hit" in line for line in said
    )
    assert not set(" ".join(caplog.messages).split()) & set(asking(*chunks).text.split())


@pytest.mark.parametrize(
    ("planted", "code"),
    [
        ("short", "prompt_too_short"),
        ("white space", "white_space_differs"),
        ("rewritten", "no_known_chunk"),
        ("not stored", "not_stored"),
        ("question registered", "question_registered"),
        ("high ratio", "ratio_too_high"),
        ("late check layer", "check_layer_late"),
    ],
)
def test_the_doctor_names_the_cause_first(opened: Open, planted: str, code: str) -> None:
    chunks = chunks_of(1, 2, 3, 4, 5)
    blend: dict[str, Any] = {"min_tokens": 256, "selector": "hkvd", "recompute_ratio": 0.15}
    blend |= {"recompute_ratio": 0.9} if planted == "high ratio" else {}
    blend |= {"check_layers": [3]} if planted == "late check layer" else {}
    engine, prompt = opened(blend), asking(*chunks[: 2 if planted == "short" else 5]).text
    known = [*chunks, Chunk("w9 w10")] if planted == "question registered" else chunks
    if planted == "white space":
        prompt = "\n".join(prompt.split(" "))
    if planted == "rewritten":
        prompt = words(5 * TOKENS, 60)
    engine.precompute(known, progress=False, register_only=planted == "not stored")
    found = [one.code for one in diagnose(engine, prompt, runs=1).findings if one.is_fault]
    # "Too short" is also said of a short prompt whose measured gain is little.
    of_times = OF_TIMES | ({"prompt_too_short"} - {code})
    assert next(one for one in found if one not in of_times) == code


# Scenarios


def test_a_conversation_reuses_its_turns_also_after_a_restart_until_it_is_forgotten(
    opened: Open, tmp_path: Path
) -> None:
    chunks = chunks_of(1, 2)
    engine = opened(kv_path=tmp_path / "kv")
    engine.precompute(chunks, progress=False)
    talk = Conversation(engine, sampling=SHORT)
    talk.ask(words(20, 90), chunks[:1])
    assert talk.last is not None
    assert talk.last.turn_tokens == 0
    talk.ask(words(20, 91), chunks[1:])
    assert talk.last.turn_tokens >= 20
    talk.save(tmp_path / "talk.json")
    engine.close()
    again = Conversation.load(tmp_path / "talk.json", opened(kv_path=tmp_path / "kv"))
    again.ask(words(20, 92))
    assert again.last is not None
    assert again.last.turn_tokens >= 40
    again.forget()
    again.ask(words(20, 93))
    assert again.last.turn_tokens == 0


def test_a_document_of_more_than_100_000_tokens_is_answered_by_windows(
    opened: Open, tmp_path: Path
) -> None:
    document = words(100_500, 1)
    shallow = AutoModelForCausalLM.from_config(
        LlamaConfig.from_dict({**MODEL.config.to_dict(), "num_hidden_layers": 1})
    ).eval()
    engine = opened({"recompute_ratio": 0.0}, model=shallow, kv_path=tmp_path, host_bytes="8MiB")
    analysis = analyze_long_document(
        engine, document, "w9 w10", chunk_tokens=2048, overlap=256, window=5, sampling=ONE
    )
    answers, report = list(analysis), analysis.report
    assert (answers[0].start, answers[-1].end) == (0, len(document))
    assert report.computed_chunks == report.chunks
    assert len(answers) == report.chunks - 4
    assert report.reused_tokens > 0.9 * report.prompt_tokens


def test_the_quality_monitor_leaves_answers_within_its_limit_alone(opened: Open) -> None:
    guard = GuardConfig(sample_share=1.0, limit=3.0)
    engine, chunks = opened({"recompute_ratio": 0.1}, guard=guard, lead_in="none"), chunks_of(1, 2)
    engine.precompute(chunks, progress=False)
    for _ in range(50):
        assert ask(engine, *chunks).recompute_ratio == 0.1
        assert until(lambda: not engine.guard_report().waiting)
    told = engine.guard_report()
    assert (told.compared, told.raised, told.stopped) == (50, 0, False)
    assert told.divergence > 0
