"""Every tier in every state: chunks are found or computed, answers are right, reasons are true."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cacheblend_rag import (
    BlendConfig,
    ConfigError,
    Document,
    Engine,
    EngineMetrics,
    Generation,
    ReasonCode,
    SamplingParams,
    StoreConfig,
    StoreError,
    open_engine,
)
from tests.contracts.places import Folder, Place, Servers
from tests.faulty_proxy import FAULTS, PASSES, State
from tests.local_servers import HOST, redis_server
from tests.models import make_model, make_tokenizer, prompt_of, words

MODEL, TOKENIZER = make_model(), make_tokenizer()
DOCUMENTS = tuple(Document(f"document {seed}", (words(30, seed),)) for seed in range(3))
CHUNKS = tuple(chunk for one in DOCUMENTS for chunk in one.to_chunks())
PROMPT = prompt_of("w5 w6", *CHUNKS, "w9 w10")
SHORT = SamplingParams.greedy(max_tokens=8)
REUSE = BlendConfig(min_tokens=0, cost_model=False, recompute_ratio=0.0, reuse_prefix=False)
"""Nothing is recomputed, so that an answer shows which stored chunks it was given."""
KEY_VARIABLE = "CACHEBLEND_MAC_KEY"
LASTING = ("disk", "file", "redis", "s3")
NETWORK = ("redis", "s3")
PATIENCE = 60.0
Found = tuple[bool, ...]
ALL, NONE = (True,) * len(CHUNKS), (False,) * len(CHUNKS)
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as started:
        yield started


@pytest.fixture
def place(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Place]:
    """An empty place of the kind that a test is parametrised by, its server well again after it."""
    made = servers.place(request.param, tmp_path / "place")
    yield made
    if made.proxy is not None:
        made.proxy.state = PASSES


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open engines around one model that know DOCUMENTS; closed in the end."""
    engines: list[Engine] = []

    def open_one(*tiers: str, **options: Any) -> Engine:
        engines.append(open_one_of(*tiers, **options))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def open_one_of(*tiers: str, **options: Any) -> Engine:
    given = {"model": MODEL, "tokenizer": TOKENIZER, "config": REUSE, **options}
    engine = open_engine("transformers", **given, **({"tiers": tiers} if tiers else {}))
    engine.register(DOCUMENTS)
    return engine


@cache
def expected(found: Found) -> tuple[int, ...]:
    """The answer of an engine that nothing befalls, if these of CHUNKS are stored."""
    engine = open_one_of()
    stored = [one for one, has in zip(DOCUMENTS, found, strict=True) if has]
    engine.precompute(stored, progress=False)
    answer = engine.generate(PROMPT, SHORT)
    assert hits(answer) == found
    engine.close()
    return tuple(answer.token_ids)


def hits(answer: Generation) -> Found:
    return tuple(chunk.hit for chunk in answer.report.chunks)


def codes(answer: Generation) -> set[ReasonCode]:
    """The reasons of all misses."""
    return {chunk.reason_code for chunk in answer.report.chunks if chunk.reason_code is not None}


def ask(engine: Engine, ratio: float = 0.0) -> Generation:
    """Ask PROMPT: it is answered in time, rightly for the chunks found, exactly at ratio 1."""
    answers: list[Generation] = []
    config = engine.config.with_changes(recompute_ratio=ratio)
    asker = Thread(target=lambda: answers.append(engine.generate(PROMPT, SHORT, config=config)))
    asker.start()
    asker.join(PATIENCE)
    assert answers, "the asker is held, or met an error"
    (answer,) = answers
    found = NONE if ratio == 1.0 else hits(answer)
    assert tuple(answer.token_ids) == expected(found)
    return answer


def until(is_met: Callable[[], Any]) -> bool:
    end = time.monotonic() + PATIENCE
    while not is_met() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(is_met())


def store_all(engine: Engine) -> None:
    assert engine.precompute(DOCUMENTS, progress=False).computed == len(DOCUMENTS)


def store_all_but(engine: Engine, stored: int) -> None:
    report = engine.precompute(DOCUMENTS, progress=False)
    assert (report.computed, report.skipped) == (len(DOCUMENTS) - stored, stored)


def test_answers_show_which_chunks_they_were_given() -> None:
    """What the other tests rely on."""
    given = [ALL, NONE, (True, True, False), (False, True, True)]
    assert len({expected(found) for found in given}) == len(given)
    engine = open_one_of()
    assert tuple(engine.generate_full(PROMPT, SHORT).token_ids) == expected(NONE)
    engine.close()


# Well


@pytest.mark.parametrize("url", ["host://", "device://?capacity=1MiB"])
def test_memory_gives_back_what_was_stored(opened: Open, url: str) -> None:
    engine = opened(url)
    store_all(engine)
    assert hits(ask(engine)) == hits(ask(engine, 1.0)) == ALL
    kind = url.partition(":")[0]
    assert {chunk.tier for chunk in ask(engine).report.chunks} == {kind}


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_what_is_stored_is_found_after_a_restart(opened: Open, place: Place) -> None:
    store_all(opened(place.url()))
    engine = opened(place.url())
    assert engine.precompute(DOCUMENTS, progress=False).skipped == len(DOCUMENTS)
    answer = ask(engine)
    assert {chunk.tier for chunk in answer.report.chunks} == {place.kind}
    assert hits(answer) == hits(ask(engine, 1.0)) == ALL
    assert codes(answer) == set()


@pytest.mark.parametrize("place", NETWORK, indirect=True)
def test_a_slow_answer_within_the_timeout_is_waited_for(opened: Open, place: Place) -> None:
    engine = opened(place.url("timeout=60s"))
    store_all(engine)
    assert place.server is not None
    place.server.pause()
    Timer(1.0, place.server.resume).start()
    assert hits(ask(engine)) == ALL


# Networks and servers fail


WRONG = {ReasonCode.STORE_ERROR, ReasonCode.DAMAGED, ReasonCode.OTHER_MODEL, ReasonCode.NOT_STORED}
SAID = {
    "refuses": {ReasonCode.STORE_ERROR},
    "hangs": {ReasonCode.STORE_ERROR},
    "drips": {ReasonCode.STORE_ERROR},
    "cuts short": {ReasonCode.STORE_ERROR},
    "is random": WRONG,
    "repeats": WRONG,
}


@pytest.mark.parametrize("state", FAULTS)
@pytest.mark.parametrize("place", NETWORK, indirect=True)
def test_a_server_that_fails_costs_reuse_and_nothing_else(
    opened: Open, place: Place, state: State
) -> None:
    engine = opened(place.url("timeout=1s"))
    store_all(engine)
    assert hits(ask(engine)) == ALL
    assert place.proxy is not None
    place.proxy.state = state
    for ratio in (0.0, 0.0, 1.0):
        answer = ask(engine, ratio)
        assert codes(answer) <= SAID[state]
        if len(SAID[state]) == 1:
            assert hits(answer) == NONE
            assert {chunk.tier for chunk in answer.report.chunks} == {place.kind}
    place.proxy.state = PASSES
    assert until(lambda: engine.precompute(DOCUMENTS, progress=False).refused == {})
    assert hits(ask(engine)) == ALL


@pytest.mark.parametrize("state", ["refuses", "hangs"])
@pytest.mark.parametrize("place", NETWORK, indirect=True)
def test_what_a_failing_server_cannot_do_is_said(opened: Open, place: Place, state: State) -> None:
    engine = opened(place.url("timeout=1s"))
    store_all(engine)
    assert place.proxy is not None
    place.proxy.state = state
    evicted = engine.evict_document("document 0")
    assert evicted.pending == (place.kind,)
    report = engine.precompute(DOCUMENTS, progress=False)
    assert report.refused_codes == {ReasonCode.STORE_ERROR: len(DOCUMENTS)}
    assert report.failed == report.refused
    assert (report.computed, report.skipped) == (0, 0)
    engine.prefetch(["document 1"])
    engine.release()
    assert "cacheblend_tier_errors_total" in EngineMetrics(engine).text()


@pytest.mark.parametrize("place", NETWORK, indirect=True)
def test_what_a_server_could_not_delete_is_deleted_once_it_answers(
    opened: Open, place: Place, tmp_path: Path
) -> None:
    """Also by the next process, from the folder; until then it is not read."""
    engine = opened(place.url("timeout=1s"), kv_path=tmp_path)
    store_all(engine)
    assert place.proxy is not None
    place.proxy.state = "refuses"
    evicted = engine.evict_document("document 0")
    assert (evicted.pending, evicted.is_noted) == ((place.kind,), True)
    assert place.kind in str(evicted.waiting)
    engine.close()
    place.proxy.state = PASSES
    again = opened(place.url("timeout=1s"), kv_path=tmp_path)
    assert hits(ask(again)) == (False, True, True)
    assert until(lambda: len(place.objects()) == 2)
    store_all_but(again, 2)
    assert hits(ask(again)) == ALL


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_what_is_evicted_is_deleted_at_once(opened: Open, place: Place) -> None:
    engine = opened(place.url())
    store_all(engine)
    evicted = engine.evict_document("document 1")
    assert (evicted, evicted.pending) == (1, ())
    assert len(place.objects()) == 2
    assert hits(ask(engine)) == (True, False, True)


# Disks fail


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_a_disk_that_cannot_be_read_is_named(opened: Open, place: Folder) -> None:
    engine = opened(place.url())
    store_all(engine)
    place.make_unreadable()
    for ratio in (0.0, 1.0):
        answer = ask(engine, ratio)
        assert codes(answer) == {ReasonCode.STORE_ERROR}
        assert {chunk.tier for chunk in answer.report.chunks} == {"disk"}


@pytest.mark.parametrize("place", ["disk", "redis"], indirect=True)
def test_without_room_nothing_new_is_stored_and_the_old_stays(opened: Open, place: Place) -> None:
    engine = opened(place.url())
    engine.precompute(DOCUMENTS[:1], progress=False)
    with place.filled_up():
        report = engine.precompute(DOCUMENTS, progress=False)
        assert (report.computed, report.skipped) == (0, 1)
        assert sum(report.refused.values()) == 2
        assert set(report.refused_codes) <= {ReasonCode.STORE_ERROR, ReasonCode.STORE_FULL}
        answer = ask(engine)
        assert hits(answer) == (True, False, False)
        assert codes(answer) == {ReasonCode.NOT_STORED}
    assert until(lambda: engine.precompute(DOCUMENTS, progress=False).refused == {})
    assert hits(ask(engine)) == ALL


@pytest.mark.parametrize("kind", ["host", "device", "disk"])
def test_a_capacity_below_one_chunk_is_said_and_fails_nothing(
    opened: Open, kind: str, tmp_path: Path
) -> None:
    engine = opened(f"{kind}://{tmp_path if kind == 'disk' else ''}?capacity=100")
    report = engine.precompute(DOCUMENTS, progress=False)
    assert (report.refused_codes, report.failed) == ({ReasonCode.STORE_FULL: 3}, {})
    assert codes(ask(engine)) == {ReasonCode.NOT_STORED}


# Forged


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "halved": lambda data: data[: len(data) // 2],
    "cut": lambda data: data[:-9],
    "rubbish": lambda data: b"x" * len(data),
    "altered head": lambda data: altered(data, 20),
    "altered middle": lambda data: altered(data, len(data) // 2),
    "altered end": lambda data: altered(data, len(data) - 9),
}


def altered(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_a_damaged_chunk_is_not_used_and_computed_again(
    opened: Open, place: Place, damage: str
) -> None:
    engine = opened(place.url())
    store_all(engine)
    name, data = next(iter(place.objects().items()))
    place.put(name, DAMAGES[damage](data))
    for code in (ReasonCode.DAMAGED, ReasonCode.NOT_STORED):
        answer = ask(engine)
        assert sum(hits(answer)) == 2
        assert codes(answer) == {code}, "it was set aside at the first"
    store_all_but(engine, 2)
    assert hits(ask(engine)) == ALL


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_an_empty_object_is_one_chunks_concern(opened: Open, place: Place) -> None:
    engine = opened(place.url())
    store_all(engine)
    place.put(next(iter(place.objects())), b"")
    answer = ask(engine)
    assert sum(hits(answer)) == 2
    assert codes(answer) <= {ReasonCode.DAMAGED, ReasonCode.NOT_STORED}
    store_all_but(engine, 2)


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_chunks_under_each_others_names_are_not_used(opened: Open, place: Place) -> None:
    engine = opened(place.url())
    store_all(engine)
    (one, data), (other, others) = list(place.objects().items())[:2]
    place.put(one, others)
    place.put(other, data)
    answer = ask(engine)
    assert sum(hits(answer)) == 1
    assert codes(answer) <= {ReasonCode.DAMAGED, ReasonCode.OTHER_MODEL}
    store_all_but(engine, 1)
    assert hits(ask(engine)) == ALL


def another_model() -> dict[str, Any]:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    return {"model": model}


FOREIGN: dict[str, Callable[[], dict[str, Any]]] = {
    "namespace": lambda: {"namespace": "theirs"},
    "precision": lambda: {"precision": "fp8"},
    "lead-in": lambda: {"lead_in": "instruction", "instruction": "w8 w9 "},
    "model": another_model,
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_a_chunk_of_another_engine_under_our_name_is_not_used(
    opened: Open, place: Place, servers: Servers, tmp_path: Path, what: str
) -> None:
    ours, theirs = place, servers.place(place.kind, tmp_path / "theirs")
    engine, other = opened(ours.url()), opened(theirs.url(), **FOREIGN[what]())
    for one in (engine, other):
        one.precompute(DOCUMENTS[:1], progress=False)
    (name,), (data,) = ours.objects(), theirs.objects().values()
    ours.put(name, data)
    answer = ask(engine)
    assert hits(answer) == NONE
    assert answer.report.chunks[0].reason_code == ReasonCode.OTHER_MODEL


@pytest.mark.parametrize(
    ("theirs", "ours"), [("a" * 16, "b" * 16), ("", "b" * 16), ("a" * 16, "")],
    ids=["another key", "no key", "a key that we lack"],
)  # fmt: skip
@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_a_chunk_stored_without_our_key_is_not_used(
    opened: Open, place: Place, monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, theirs)
    store_all(opened(place.url()))
    monkeypatch.setenv(KEY_VARIABLE, ours)
    answer = ask(opened(place.url()))
    assert hits(answer) == NONE
    assert codes(answer) == {ReasonCode.BAD_SIGNATURE}
    if not ours:
        monkeypatch.setenv(KEY_VARIABLE, theirs)
        assert hits(ask(opened(place.url()))) == ALL, "they are left alone"


# Expired and evicted


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_what_is_past_its_time_is_not_used_and_goes(opened: Open, place: Place) -> None:
    store_all(opened(place.url()))
    time.sleep(0.6)
    engine = opened(place.url("ttl=0.5s"))
    answer = ask(engine)
    assert hits(answer) == NONE
    assert codes(answer) == {ReasonCode.NOT_STORED}
    assert until(lambda: not place.objects())


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_what_the_place_let_go_of_is_computed_again(opened: Open, place: Place) -> None:
    engine = opened(place.url())
    store_all(engine)
    place.delete(next(iter(place.objects())))
    answer = ask(engine)
    assert sum(hits(answer)) == 2
    assert codes(answer) == {ReasonCode.NOT_STORED}
    store_all_but(engine, 2)
    assert hits(ask(engine)) == ALL


def test_a_disks_capacity_is_kept_whoever_writes(opened: Open, tmp_path: Path) -> None:
    place = Folder(tmp_path)
    opened(place.url()).precompute(DOCUMENTS[:1], progress=False)
    (size,) = map(len, place.objects().values())
    engines = [opened(place.url(f"capacity={int(2.5 * size)}")) for _ in range(2)]
    for turn in range(6):
        engines[turn % 2].precompute([DOCUMENTS[turn % 3]], progress=False)
        assert 0 < sum(map(len, place.objects().values())) <= 2.5 * size
        answer = ask(engines[1 - turn % 2])
        assert sum(hits(answer)) == len(place.objects())
        assert codes(answer) == {ReasonCode.NOT_STORED} or hits(answer) == ALL
    assert len(place.objects()) == 2


# Tiers in a row


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_what_a_lower_tier_has_is_kept_by_the_upper(opened: Open, place: Place) -> None:
    store_all(opened(place.url()))
    engine = opened("host://", place.url())
    for kind in (place.kind, "host"):
        assert {chunk.tier for chunk in ask(engine).report.chunks} == {kind}
    place.clear()
    assert hits(ask(engine)) == ALL


@pytest.mark.parametrize("state", ["refuses", "drips", "hangs"])
@pytest.mark.parametrize("place", NETWORK, indirect=True)
def test_a_failing_tier_is_answered_for_by_the_others(
    opened: Open, place: Place, tmp_path: Path, state: State
) -> None:
    engine = opened("host://?capacity=100", place.url("timeout=1s"), f"disk://{tmp_path}")
    store_all(engine)
    assert {chunk.tier for chunk in ask(engine).report.chunks} == {place.kind}
    assert place.proxy is not None
    place.proxy.state = state
    for _ in range(2):
        answer = ask(engine)
        assert hits(answer) == ALL
        assert {chunk.tier for chunk in answer.report.chunks} == {"disk"}


def test_all_faults_in_turn_under_load_make_no_answer_wrong(
    opened: Open, servers: Servers, tmp_path: Path
) -> None:
    """Requests, deletions and indexing at once, over memory for one chunk, Redis and a disk."""
    place = servers.place("redis", tmp_path)
    assert place.proxy is not None
    one = 40_000
    tiers = [f"host://?capacity={one}", place.url("timeout=1s"), f"disk://{tmp_path}/disk"]
    engine, over, wrong = opened(*tiers), Event(), list[BaseException]()

    def repeat(act: Callable[[], object]) -> None:
        try:
            while not over.is_set():
                act()
        except BaseException as error:
            wrong.append(error)

    def index() -> None:
        document = random.choice(DOCUMENTS)
        engine.evict_document(document.document_id)
        engine.register([document])
        time.sleep(0.05)
        engine.precompute([document], progress=False)

    expected(ALL)
    workers = [Thread(target=repeat, args=(act,)) for act in (lambda: ask(engine), index)]
    for worker in workers:
        worker.start()
    for state in FAULTS:
        for turn in (state, PASSES):
            place.proxy.state = turn
            time.sleep(0.5)
    over.set()
    for worker in workers:
        worker.join(PATIENCE)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)
    assert until(lambda: engine.precompute(DOCUMENTS, progress=False, verify=True).refused == {})
    assert hits(ask(engine)) == ALL


@pytest.mark.parametrize("place", NETWORK, indirect=True)
def test_a_failing_tier_is_not_asked_again_by_each_request(opened: Open, place: Place) -> None:
    engine = opened(place.url("timeout=1s"))
    store_all(engine)
    assert place.proxy is not None
    place.proxy.state = "hangs"
    ask(engine)
    before = count(engine, "skipped_total", place.kind)
    ask(engine)
    assert count(engine, "skipped_total", place.kind) > before


def count(engine: Engine, name: str, tier: str) -> float:
    metrics = EngineMetrics(engine)
    return metrics.registry.get_sample_value(f"cacheblend_tier_{name}", {"tier": tier}) or 0.0


# Processes


def rewrite(url: str, rounds: int, begun: Any) -> None:
    """Store and evict all documents but the first, over and over: what other processes run."""
    engine = open_one_of(url)
    begun.set()
    for _ in range(rounds):
        for document in DOCUMENTS[1:]:
            engine.precompute([document], progress=False)
            engine.evict_document(document.document_id)
            engine.register([document])
    engine.close()


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes that have imported this module."""
    started = get_context("forkserver")
    started.set_forkserver_preload([__name__])
    return started


@pytest.mark.parametrize("place", ["disk", "file", "redis"], indirect=True)
def test_a_process_killed_while_it_writes_loses_and_damages_nothing(
    opened: Open, place: Place, processes: ForkServerContext
) -> None:
    opened(place.url()).precompute(DOCUMENTS[:1], progress=False)
    for _ in range(3):
        begun = processes.Event()
        writer = processes.Process(target=rewrite, args=(place.url(), 100_000, begun))
        writer.start()
        assert begun.wait(PATIENCE)
        time.sleep(random.random() / 4)
        writer.kill()
        writer.join()
        engine = opened(place.url())
        answer = ask(engine)
        assert hits(answer)[0]
        assert codes(answer) <= {ReasonCode.NOT_STORED}
        assert engine.precompute(DOCUMENTS, progress=False).refused == {}
        assert hits(ask(engine)) == ALL
        assert count(engine, "quarantined_total", place.kind) == 0
        for document in DOCUMENTS[1:]:
            engine.evict_document(document.document_id)


@pytest.mark.parametrize("place", ["disk", "redis"], indirect=True)
def test_processes_share_a_place(opened: Open, place: Place, processes: ForkServerContext) -> None:
    engine = opened(place.url())
    engine.precompute(DOCUMENTS[:1], progress=False)
    told = (place.url(), 10, processes.Event())
    writers = [processes.Process(target=rewrite, args=told) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        answer = ask(engine)
        assert hits(answer)[0]
        assert codes(answer) <= {ReasonCode.NOT_STORED}
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert count(engine, "quarantined_total", place.kind) == 0
    store_all_but(engine, 1)
    assert hits(ask(engine)) == ALL


# Read only


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_a_read_only_store_reads_and_changes_nothing(
    opened: Open, place: Place, tmp_path: Path
) -> None:
    opened(place.url()).precompute(DOCUMENTS[:2], progress=False)
    name, data = next(iter(place.objects().items()))
    place.put(name, altered(data, len(data) // 2))
    before = seen(place)
    replica = opened("host://", place.url(), read_only=True)
    for _ in range(2):
        answer = ask(replica)
        assert sum(hits(answer)) == 1
        assert codes(answer) == {ReasonCode.DAMAGED, ReasonCode.NOT_STORED}
    for refused in (
        lambda: replica.precompute(DOCUMENTS, progress=False),
        lambda: replica.evict_document("document 1"),
    ):
        with pytest.raises(StoreError, match="read only") as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert seen(place) == before


def seen(place: Place) -> object:
    """All that changes when something is written, moved or marked as used."""
    if not isinstance(place, Folder):
        return place.objects()
    files = sorted(path for path in place.folder.rglob("*") if path.is_file())
    return [(path, path.stat().st_ctime_ns, path.read_bytes()) for path in files]


def test_a_store_that_is_not_there_cannot_be_read_only(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no chunk KV to read"):
        opened(kv_path=tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


# Pins


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Any]:
    """Of engines on a place: what has commands know the documents that are in it."""
    folder = tmp_path / "tiny"
    MODEL.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return {"model": str(folder), "kv_path": str(tmp_path / "known")}


Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(known: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``store`` on tiers; returns the exit code, what it tells in JSON, and stderr."""
    (command,) = entry_points(group="console_scripts", name="cacheblend-rag")
    main = command.load()

    def run_one(tiers: list[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
        beside = [] if arguments[0] == "copy" else [known["kv_path"]]
        asked = ["cacheblend-rag", "store", *arguments, *beside, *tiers, "--json"]
        capsys.readouterr()
        with patch("sys.argv", asked), pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), json.loads(told.out or "{}"), told.err

    return run_one


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_what_is_pinned_is_evicted_for_no_room_and_no_age(
    opened: Open, place: Place, servers: Servers, tmp_path: Path, known: dict[str, Any], run: Run
) -> None:
    opened(place.url(), **known).precompute(DOCUMENTS[:1], progress=False)
    (size,) = map(len, place.objects().values())
    pin = ("pin", "--only", "document=document 0", "--only", f"model={known['model']}")
    assert run([place.url()], *pin)[:2] == (0, {"path": known["kv_path"], "pinned": 1})
    small = opened(place.url(f"capacity={int(2.5 * size)}"), **known)
    for turn in range(4):
        small.precompute([DOCUMENTS[1 + turn % 2]], progress=False)
        assert len(place.objects()) == 2
    assert hits(ask(small))[0]
    time.sleep(0.6)
    old = ("host://", place.url("ttl=0.5s"))
    engine = opened(*old, **known)
    for _ in range(2):
        assert hits(ask(engine)) == (True, False, False)
    redis = servers.place("redis", tmp_path)
    code, told, said = run([place.url(), redis.url()], *pin)
    assert (code, told["pinned"]) == (0, 1)
    assert "no pins are kept in redis: chunks may be evicted there" in said
    assert run([place.url()], *pin, "--undo")[1]["unpinned"] == 1
    assert hits(ask(opened(*old, **known))) == NONE
    assert until(lambda: not place.objects())


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_who_evicts_what_is_pinned_evicts_it(
    opened: Open, place: Place, known: dict[str, Any], run: Run
) -> None:
    engine = opened(place.url(), **known)
    store_all(engine)
    model = ("--only", f"model={known['model']}")
    for document in ("document 0", "document 1"):
        run([place.url()], "pin", "--only", f"document={document}", *model)
    assert engine.evict_document("document 0") == 1
    told = run([place.url()], "evict", "--only", "document=document 1", *model)[1]
    assert (told["evicted"], told["pending"]) == (1, [])
    assert hits(ask(engine)) == (False, False, True)


@pytest.mark.parametrize("place", ["file", *NETWORK], indirect=True)
def test_a_place_that_keeps_no_pins_says_so(
    opened: Open, place: Place, known: dict[str, Any], run: Run
) -> None:
    store_all(opened(place.url(), **known))
    pin = ("pin", "--only", "document=document 0", "--only", f"model={known['model']}")
    code, told, said = run([place.url()], *pin)
    assert (code, told, said.count("\n")) == (2, {}, 1)
    assert f"no pins are kept in {place.kind}" in said


def test_what_is_pinned_in_memory_stays_there(opened: Open) -> None:
    """By a program, for its own process."""
    engine = opened("host://?capacity=75000")  # room for two
    engine.store.pin(engine.key(CHUNKS[0]))
    for document in (*DOCUMENTS, *DOCUMENTS[1:]):
        engine.precompute([document], progress=False)
    assert (hits(ask(engine))[0], sum(hits(ask(engine)))) == (True, 2)
    engine.release()
    assert hits(ask(engine)) == (True, False, False)


# Commands


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_commands_tell_what_is_there_and_evict_what_is_asked(
    opened: Open, place: Place, known: dict[str, Any], run: Run
) -> None:
    engine, at = opened(place.url(), **known), [place.url()]
    store_all(engine)
    keys = [str(engine.key(chunk)) for chunk in CHUNKS]
    assert {one["key"] for one in run(at, "ls")[1]["chunks"]} == {*keys}
    told = run(at, "stats")[1]
    assert told["entries"] == told["tiers"][place.kind]["entries"] == 3
    beside = sum(map(len, place.objects().values())) - told["bytes"]
    assert beside == (3 * 8 if place.kind == "redis" else 0)  # Redis' values begin with a time
    assert [*told["models"].values()] == [engine.model_name]
    document = ("--only", "document=document 1", "--only", f"model={known['model']}")
    assert [one["key"] for one in run(at, "ls", *document)[1]["chunks"]] == [keys[1]]
    assert run(at, "evict", *document)[1]["evicted"] == 1
    assert hits(ask(engine)) == (True, False, True)
    assert run(at, "evict", "--only", f"key={keys[0]}")[1]["evicted"] == 1
    assert hits(ask(engine)) == (False, False, True)
    assert run(at, "evict", "--yes")[1]["evicted"] == 1
    assert not place.objects()


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_verify_names_what_is_damaged_and_repair_sets_it_aside(
    opened: Open, place: Place, known: dict[str, Any], run: Run
) -> None:
    at = [place.url()]
    store_all(opened(*at, **known))
    code, told, _ = run(at, "verify")
    assert (code, told["checked"], told["damaged"]) == (0, 3, [])
    name, data = next(iter(place.objects().items()))
    place.put(name, altered(data, len(data) // 2))
    for repair in ([], ["--repair"]):
        code, told, _ = run(at, "verify", *repair)
        assert (code, told["checked"], len(told["damaged"])) == (1, 3, 1)
        assert told["damaged"][0]["key"] in name
        assert told["quarantined"] == len(repair)
    assert run(at, "verify")[0] == 0
    engine = opened(*at, **known)
    store_all_but(engine, 2)
    assert hits(ask(engine)) == ALL


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_copy_brings_chunks_into_a_faster_place(
    opened: Open, place: Place, tmp_path: Path, known: dict[str, Any], run: Run
) -> None:
    store_all(opened(place.url(), **known))
    fast = f"disk://{tmp_path}/fast?name=fast"
    for copied, there in ((3, 0), (0, 3)):
        told = run([place.url(), fast], "copy")[1]
        assert (told["copied"], told["there"]) == (copied, there)
        assert (told["failed"], told["left"]) == (0, 0)
    place.clear()
    assert hits(ask(opened(fast))) == ALL


# Secrets


def test_no_password_or_key_is_told(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(KEY_VARIABLE, "hunter2 of the chunks")
    told = list[object]()
    with redis_server("--requirepass", "hunter2") as server:
        place = f"{HOST}:{server.port}"
        right = opened(f"redis://:hunter2@{place}")
        store_all(right)
        assert hits(ask(right)) == ALL
        wrong = opened(f"redis://:hunter22@{place}")
        assert codes(ask(wrong)) == {ReasonCode.STORE_ERROR}
        report = wrong.precompute(DOCUMENTS, progress=False)
        told += [right, wrong, report, wrong.evict_document("document 0").waiting]
        told += [EngineMetrics(wrong).text(), ask(wrong).report.to_dict()]
        monkeypatch.setenv("CACHEBLEND_REDIS_PASSWORD", "hunter2")
        assert hits(ask(opened(f"redis://{place}"))) == ALL
    assert codes(ask(right)) == {ReasonCode.STORE_ERROR}
    settings = StoreConfig(tiers=[f"redis://:hunter2@{place}"])
    told += [settings, settings.model_dump(), settings.model_dump_json()]
    for mistake in ("?capacity=much", "/0?ttl=-1", "/0?what=1", "/0#x"):
        with pytest.raises(ConfigError) as caught:
            StoreConfig(tiers=[f"redis://:hunter2@{place}{mistake}"])
        told += [caught.value, repr(caught.value), caught.value.__cause__]
    assert "hunter2" not in f"{told} {caplog.text}"
