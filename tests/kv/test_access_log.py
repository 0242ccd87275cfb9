"""The access log: what prompts ask for is noted, and warms the store that is opened next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag import StoreConfig
from cacheblend_rag.kv import TieredKVStore
from cacheblend_rag.kv.access_log import AccessLog

from .samples import chunk_files, make_key, make_kv, until

KEYS = [make_key(number) for number in range(5)]


def read(store: TieredKVStore, *numbers: int) -> None:
    with store.fetch([KEYS[number] for number in numbers]) as fetch:
        for _ in numbers:
            fetch.take()


def filled(folder: Path, *prompts: tuple[int, ...], log: Path) -> None:
    """Store all chunks, then ask for those of prompts."""
    with TieredKVStore.of(StoreConfig(kv_path=str(folder), access_log=str(log))) as store:
        for number, key in enumerate(KEYS):
            store.put(key, make_kv(number))
        for prompt in prompts:
            read(store, *prompt)
        until(lambda: not prompts or log.read_bytes().count(b"\n") == len(prompts))


def test_a_line_names_the_chunks_of_a_prompt(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    filled(tmp_path / "kv", (2, 0), (1,), log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {tuple(line["keys"]) for line in lines} == {
        (str(KEYS[2]), str(KEYS[0])),
        (str(KEYS[1]),),
    }
    assert log.stat().st_mode & 0o077 == 0


def test_reading_that_keeps_nothing_is_not_noted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with TieredKVStore.of(StoreConfig(access_log=str(log))) as store:
        store.fetch(KEYS, promote=False).close()
    assert not log.exists()


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


def test_no_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "target")
    AccessLog(tmp_path / "log").note(KEYS)
    assert not (tmp_path / "target").exists()
