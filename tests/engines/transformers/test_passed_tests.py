from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendPrompt, Chunk, open_engine
from cacheblend_rag.blend.trial import check_layers
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import compatibility, passed_tests
from cacheblend_rag.engines.transformers.passed_tests import recorded_in
from cacheblend_rag.settings import BlendConfig
from tests.toy import TOY

CHUNKS = [Chunk("This note is about Ivan Novak. " * 8), Chunk("The bridge is distant. " * 8)]


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows whenever a model's layers are tested."""
    runs: list[bool] = []

    def counted(*args: Any, **kwargs: Any) -> None:
        runs.append(True)
        check_layers(*args, **kwargs)

    monkeypatch.setattr(compatibility, "check_layers", counted)
    return runs


def answer(file: Path) -> tuple[tuple[int, ...], str, bool]:
    """Open an engine that may use a record; returns an answer, the fingerprint, whether blended."""
    blend = BlendConfig(cost_model=False, min_tokens=0)
    with recorded_in(file), closing(open_engine("transformers", model=TOY, config=blend)) as it:
        it.precompute(CHUNKS, progress=False)
        prompt = BlendPrompt.of(*CHUNKS, "What is the sport of Ivan Novak?")
        done = it.generate(prompt, SamplingParams.greedy(max_tokens=4))
        return tuple(done.token_ids), it.fingerprint, done.report.blended


def test_a_model_is_tested_once_and_blends_the_same(tmp_path, tested):
    file = tmp_path / "tests.json"
    first = answer(file)
    assert (len(tested), first[2]) == (1, True)
    assert answer(file) == first
    assert len(tested) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: {**plain, "state": "another"},
        lambda plain: {**plain, "layouts": [[0, "thirds", False]]},
        lambda plain: {**plain, "layouts": plain["layouts"][1:]},
        lambda plain: {**plain, "positioned": "yes"},
        lambda plain: [plain],
    ],
)
def test_a_record_that_does_not_fit_is_not_used(
    tmp_path: Path, tested: list[bool], spoil: Callable[[Any], Any]
):
    file = tmp_path / "tests.json"
    answer(file)
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    answer(file)
    assert len(tested) == 2


def test_changed_sources_are_tested_again(tmp_path, tested, monkeypatch):
    file = tmp_path / "tests.json"
    answer(file)
    monkeypatch.setattr(passed_tests, "_sources", lambda: [("changed.py", 1, 1)])
    answer(file)
    assert len(tested) == 2


def test_nothing_is_recorded_elsewhere(tmp_path, tested):
    file = tmp_path / "tests.json"
    for _ in range(2):
        with closing(open_engine("transformers", model=TOY)):
            pass
    assert (len(tested), file.exists()) == (2, False)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, tested):
    (tmp_path / "file").write_text("")
    assert answer(tmp_path / "file" / "tests.json")[2]
