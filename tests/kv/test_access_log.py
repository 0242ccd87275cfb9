"""The access log: what prompts ask for is noted, and warms the store that is opened next."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

import pytest

from cacheblend_rag import StoreConfig
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import Entry, HostTier, KVKey, TieredKVStore, access_log
from cacheblend_rag.kv.access_log import (
    BYTES_A_MINUTE,
    LONGEST_LINE,
    MOST_BYTES,
    MOST_KEYS_A_LINE,
    NOTED_A_MINUTE,
    AccessLog,
)
from cacheblend_rag.kv.whole_chunks import ASKED_AT_ONCE

from .samples import chunk_files, make_key, make_kv, taken, until

KEYS = [make_key(number) for number in range(5)]


def read(store: TieredKVStore, *numbers: int) -> None:
    with store.fetch([KEYS[number] for number in numbers]) as source:
        taken(source)


def filled(folder: Path, *prompts: tuple[int, ...], log: Path) -> None:
    """Store all chunks, then ask for those of prompts."""
    with TieredKVStore.of(StoreConfig(kv_path=str(folder), access_log=str(log))) as store:
        for number, key in enumerate(KEYS):
            store.put(key, make_kv(number))
        for prompt in prompts:
            read(store, *prompt)
        until(lambda: (log.read_bytes() if log.exists() else b"").count(b"\n") == len(prompts))


def test_a_line_names_the_chunks_of_a_prompt(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    filled(tmp_path / "kv", (2, 0), (1,), log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {tuple(line["keys"]) for line in lines} == {
        (str(KEYS[2]), str(KEYS[0])),
        (str(KEYS[1]),),
    }
    assert log.stat().st_mode & 0o077 == 0


def test_the_most_used_come_first_and_the_latest_of_equal_ones(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log")
    for numbers in ((0, 1, 1), (2, 1), (3,), (2,)):
        log.note([KEYS[number] for number in numbers])
    assert log.most_used() == [KEYS[2], KEYS[1], KEYS[3], KEYS[0]]


def test_a_store_that_is_opened_next_is_warm_as_far_as_there_is_room(tmp_path: Path) -> None:
    log, kv = tmp_path / "log", tmp_path / "kv"
    filled(kv, (4, 1), (1, 3), (1, 4), log=log)
    room = 2 * max(path.stat().st_size for path in chunk_files(kv))
    settings = StoreConfig(kv_path=str(kv), access_log=str(log), host_bytes=room)
    with TieredKVStore.of(settings) as store:
        host = store.tiers[0]
        until(lambda: len(list(host.entries())) == 2)
        assert {key for key, _ in host.entries()} == {KEYS[1], KEYS[4]}


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"keys": 1}', b'{"keys": ["x"]}', b"\xff"])
def test_lines_that_are_none_are_passed_over(tmp_path: Path, line: bytes) -> None:
    log = AccessLog(tmp_path / "log")
    log.note(KEYS[:1])
    with log.path.open("ab") as file:
        file.write(line + b"\n")
    log.note(KEYS[:1])
    assert log.most_used() == KEYS[:1]


def test_a_log_does_not_outgrow_its_bound(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log", most_bytes=2000)
    for number in range(300):
        log.note([KEYS[number % 5]])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2000 + 200
    assert set(log.most_used()) == set(KEYS)


def test_a_log_that_cannot_be_written_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AccessLog(tmp_path / "none" / "log")
    log.note(KEYS)
    log.note(KEYS)
    assert [record.getMessage()[:10] for record in caplog.records] == ["access log"]
    assert log.most_used() == []


def test_only_what_is_stored_is_noted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    unknown = [make_key(number) for number in range(100, 140)]
    settings = StoreConfig(kv_path=str(tmp_path / "kv"), access_log=str(log))
    with TieredKVStore.of(settings) as store:
        store.put(KEYS[1], make_kv(1))
        store.put(KEYS[3], make_kv(3))
        with store.fetch(unknown) as source:
            taken(source)
        with store.fetch([*unknown, KEYS[3], KEYS[0], KEYS[1]]) as source:
            taken(source)
        until(log.exists)
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["keys"] == [str(KEYS[3]), str(KEYS[1])]


def test_who_repeats_a_question_does_not_outvote_everybody(tmp_path: Path) -> None:
    now = [60_000.0]
    log = AccessLog(tmp_path / "log", clock=lambda: now[0])
    for _ in range(1000):
        log.note(KEYS[:1])
    for minute in range(2):
        now[0] += 60 * minute
        for _ in range(NOTED_A_MINUTE):
            log.note(KEYS[1:2])
    assert log.path.read_bytes().count(str(KEYS[0]).encode()) == NOTED_A_MINUTE
    assert log.most_used() == [KEYS[1], KEYS[0]]


def test_many_prompts_of_one_minute_do_not_drive_out_the_hours_before(tmp_path: Path) -> None:
    now = [60_000.0]
    log = AccessLog(tmp_path / "log", clock=lambda: now[0])
    log.note(KEYS)
    now[0] += 3600
    for first in range(0, 40_000, 1000):
        log.note([make_key(number) for number in range(first, first + 1000)])
    assert log.path.stat().st_size < BYTES_A_MINUTE + 1000
    assert set(KEYS) <= set(log.most_used())


def test_a_line_names_a_bounded_number_of_chunks(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log")
    log.note([make_key(number) for number in range(2 * MOST_KEYS_A_LINE)])
    assert len(json.loads(log.path.read_bytes())["keys"]) == MOST_KEYS_A_LINE
    assert log.path.stat().st_size < LONGEST_LINE
    assert len(log.most_used()) == MOST_KEYS_A_LINE


def test_of_a_large_log_its_end_is_read_and_no_more_keys_are_held_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AccessLog(tmp_path / "log", most_bytes=1000)
    lines = [json.dumps({"at": 1, "keys": [str(make_key(number))]}) for number in range(100)]
    log.path.write_text("\n".join(lines) + "\n")
    within = 1000 // (len(lines[-1]) + 1)
    assert log.most_used() == [make_key(number) for number in range(99, 99 - within, -1)]
    monkeypatch.setattr(access_log, "MOST_KEYS", 3)
    assert log.most_used() == [make_key(number) for number in (99, 98, 97)]
    longer = json.dumps({"at": 1, "keys": [str(KEYS[0])], "more": "x" * LONGEST_LINE})
    log = AccessLog(tmp_path / "other")
    log.path.write_text(longer + "\n")
    assert log.most_used() == []


def test_a_sparse_file_is_read_no_further_than_its_bound(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log")
    with log.path.open("wb") as file:
        file.truncate(40 << 30)
    tracemalloc.start()
    assert log.most_used() == []
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * MOST_BYTES


def make_other_kind(path: Path, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.with_name("elsewhere").write_text("precious")
            path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("name", ["log", "log.1"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_regular_file_is_refused_when_a_store_is_opened(
    tmp_path: Path, kind: str, name: str
) -> None:
    make_other_kind(tmp_path / name, kind)
    said = f"access log {tmp_path / name} is not a regular file: give access_log another path"
    with pytest.raises(StoreError, match=re.escape(said)):
        TieredKVStore.of(StoreConfig(access_log=str(tmp_path / "log")))


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_becomes_no_regular_file_later_is_told_once_and_waited_for_by_nobody(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = AccessLog(tmp_path / "log")
    make_other_kind(log.path, kind)
    log.note(KEYS)
    log.note(KEYS)
    assert log.most_used() == []
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"access log {log.path} cannot be written"
    ]
    if kind == "link":
        assert (tmp_path / "elsewhere").read_text() == "precious"


def test_closing_ends_a_warm_up_that_has_begun(tmp_path: Path) -> None:
    """A warm-up asks for many chunks; the store does not wait for it to have asked for all."""
    asked: list[int] = []
    begun, closing = Event(), Event()

    class Asked(HostTier):
        def entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
            asked.append(len(keys))
            begun.set()
            assert closing.wait(20)
            return super().entry_many(keys)

    log = AccessLog(tmp_path / "log")
    for first in range(0, 3000, 1000):
        log.note([make_key(number) for number in range(first, first + 1000)])
    store = TieredKVStore([HostTier(None), Asked(None, name="slow")])
    store.follow(log)
    assert begun.wait(20)
    closer = Thread(target=store.close)
    closer.start()
    until(store.prefetching.closing.is_set)
    closing.set()
    closer.join(20)
    assert not closer.is_alive()
    assert asked == [ASKED_AT_ONCE]
