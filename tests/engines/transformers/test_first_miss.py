"""The one warning of a prompt of which nothing is reused though chunks were expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cacheblend_rag import Chunk, SamplingParams, TieredKVStore, TransformersEngine
from tests.engines.transformers.conftest import EngineFactory
from tests.models import words

SHORT = SamplingParams(max_tokens=1)
PASSAGE = words(40, 3)
OTHER = words(40, 9)
QUESTION = f" {words(5, 20)}"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name.endswith("request_log") and r.levelname == "WARNING"
    ]


def never_transformed(engine: TransformersEngine) -> None:
    engine.precompute([Chunk(OTHER)], progress=False)
    engine.generate(PASSAGE + QUESTION, SHORT, hints=[Chunk(PASSAGE)])


def changed_by_a_template(engine: TransformersEngine) -> None:
    engine.precompute([Chunk(PASSAGE)], progress=False)
    engine.generate(PASSAGE[:60] + QUESTION, SHORT, hints=[Chunk(PASSAGE)])


def never_computed(engine: TransformersEngine) -> None:
    engine.register([Chunk(PASSAGE)])
    engine.generate(PASSAGE + QUESTION, SHORT)


def too_short(engine: TransformersEngine) -> None:
    engine.precompute([Chunk(PASSAGE)], progress=False)
    engine.generate(PASSAGE + QUESTION, SHORT, config=engine.config.with_changes(min_tokens=256))


@pytest.mark.parametrize(
    ("use", "cause"),
    [
        (never_transformed, "never given to precompute"),
        (changed_by_a_template, "cut, or changed by a template"),
        (never_computed, "never computed, or was evicted"),
        (too_short, "40 reusable tokens are fewer than min_tokens=256"),
    ],
)
def test_a_miss_is_warned_of_once_with_its_cause(
    make_engine: EngineFactory,
    caplog: pytest.LogCaptureFixture,
    use: Callable[[TransformersEngine], None],
    cause: str,
) -> None:
    engine = make_engine()
    use(engine)
    use(engine)
    (warning,) = warnings(caplog)
    assert cause in warning


def test_another_instruction_is_named(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    store = TieredKVStore.open(host_bytes=1 << 28)
    first = make_engine(instruction=words(4, 1), store=store)
    first.precompute([Chunk(PASSAGE)], progress=False)
    second = make_engine(instruction=words(4, 2), store=store, registry=first.registry)
    second.generate(f"{words(4, 2)} {PASSAGE}{QUESTION}", SHORT)
    (warning,) = warnings(caplog)
    assert "another instruction" in warning


def test_nothing_is_said_where_nothing_was_to_be_reused(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.precompute([Chunk(PASSAGE)], progress=False)
    engine.generate(OTHER + QUESTION, SHORT)
    engine.generate_full(PASSAGE + QUESTION, SHORT)
    engine.generate(PASSAGE + QUESTION, SHORT, hints=[Chunk(PASSAGE)])
    assert warnings(caplog) == []


def test_a_miss_that_is_being_filled_is_no_reason_to_warn(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.fill_on_miss = True
    never_computed(engine)
    assert warnings(caplog) == []
    engine.close()
