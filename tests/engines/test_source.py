"""Engines that are given, and engines that are opened on first use."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cacheblend_rag import BlendConfig, Engine, EngineConfig, EngineSource, StoreConfig, open_engine
from cacheblend_rag.errors import ConfigError
from tests.toy import TOY

DEMO = EngineConfig(engine="transformers", model=TOY, store=StoreConfig(host_bytes=1 << 20))


def never() -> EngineConfig:
    raise AssertionError("the engine was there already")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(DEMO)


def test_settings_are_asked_for_once_at_the_first_use_even_by_many_threads() -> None:
    source, asked = EngineSource(), []

    def settings() -> EngineConfig:
        asked.append(threading.get_ident())
        return DEMO

    assert source.engine is None
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: source.open(settings), range(8)))
    assert len(set(map(id, opened))) == len(asked) == 1
    assert source.engine is opened[0] is source.open(never)


def test_sources_that_share_agree_on_all_but_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(**changes: object) -> Engine:
        return EngineSource().open(lambda: DEMO.with_changes(**changes))

    first = opened()
    assert opened(blend=BlendConfig(recompute_ratio=0.5)) is first
    others: list[dict[str, object]] = [
        {"namespace": "tenant"},
        {"instruction": "Read:"},
        {"lead_in": "bos"},
        {"store": {"host_bytes": 1 << 21}},
        {"dtype": "bfloat16"},
    ]
    engines = [first, *(opened(**change) for change in others)]
    assert len(set(map(id, engines))) == len(others) + 1
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a forked process
    assert opened() is not first


def test_a_given_engine_is_returned_and_goes_nowhere_else(engine: Engine) -> None:
    source = EngineSource.of(engine, None, example="llm.engine")
    assert source.was_given
    assert source.open(never) is engine
    for twin in (copy.copy(source), copy.deepcopy(source)):
        assert twin.was_given
        assert twin.engine is engine
    with pytest.raises(ConfigError, match="an open engine cannot be pickled: give model="):
        pickle.dumps(source)


def test_copies_and_pickles_open_it_by_their_own_settings() -> None:
    source = EngineSource()
    engine = source.open(lambda: DEMO)
    for twin in (copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))):  # noqa: S301
        assert twin.engine is None, "its settings may be changed"
        assert twin.open(lambda: DEMO) is engine


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (3, "engine is a int: give an open engine, such as llm.open(), or auto, transformers"),
        ("warp", "engine='warp' must be auto, transformers, vllm or a server's URL"),
        ("localhost:8000", "lacks a scheme"),
        ("http://me:sesame@host", "give its key as api_key="),
    ],
)
def test_what_is_no_engine_is_named(engine: object, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineSource.of(engine, "m", example="llm.open()")
    assert told in str(raised.value)
    assert "sesame" not in str(raised.value)


def test_what_a_given_engine_has_settled_is_refused(engine: Engine) -> None:
    source = EngineSource(engine)
    defaults = {"namespace": "default", "store": StoreConfig()}
    source.check_settled({**defaults, "dtype": None, "model": engine.model_name}, defaults)
    source.check_settled({"api_key": "sesame", "max_tokens": 3}, defaults)
    given = {"namespace": "own", "model": "other", "store": StoreConfig(host_bytes=6)}
    with pytest.raises(ConfigError, match=r"^model, namespace, store: fixed by the"):
        source.check_settled(given, defaults)
    EngineSource().check_settled({"namespace": "own"}, defaults)
