"""Reports come back from JSON as they were written, and odd files are refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.observe.explained import Explained
from cacheblend_rag.observe.report_file import read_explained
from cacheblend_rag.reason import ReasonCode
from tests.engines.vllm.hostile import HOSTILE, mutated
from tests.observe.explained_prompts import explained


def written(folder: Path, plain: Any) -> Path:
    path = folder / "report.json"
    path.write_text(plain if isinstance(plain, str) else json.dumps(plain), "utf-8")
    return path


def test_an_explained_prompt_is_read_back_whole(tmp_path: Path) -> None:
    found = explained()
    read = read_explained(written(tmp_path, found.to_dict()))
    assert read == found
    reason = read.report.selector_reason
    assert reason is not None
    assert reason.code is ReasonCode.NO_PRIOR


def test_a_bare_report_and_an_answer_are_read_too(tmp_path: Path) -> None:
    report = explained().report
    assert read_explained(written(tmp_path, report.to_dict())) == Explained(report)
    asked = {"question": "Who?", "answer": "Anna", "report": report.to_dict(), "sources": []}
    assert read_explained(written(tmp_path, asked)) == Explained(report, answer="Anna")


def changed(**changes: Any) -> dict[str, Any]:
    plain = explained().to_dict()
    return {**plain, "report": {**plain["report"], **changes}}


CHUNK = explained().report.to_dict()["chunks"][0]


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ("{", "is not a JSON file"),
        ("[" * 100_000, "is not a JSON file"),
        ([], "it is not an object"),
        ({}, "holds no report"),
        ({"report": 3}, "the report is not an object"),
        ({**explained().to_dict(), "tokens": ["a"]}, "a text for each token"),
        ({**explained().to_dict(), "cost": {"full_seconds": "1"}}, "full_seconds is a str"),
        (changed(prompt_tokens=3), "is below the tokens"),
        (changed(prompt_tokens=True), "prompt_tokens is a bool"),
        (changed(compute_share=float("nan")), "compute_share is no number"),
        (changed(chunks=[{**CHUNK, "start": 11}]), "does not fit the prompt"),
        (changed(chunks=[{**CHUNK, "recomputed": -1}]), "does not fit the prompt"),
        (changed(trace={"rows": [13]}), "the trace does not fit the prompt"),
        (changed(trace={"rows": [-1]}), "negative number of rows"),
        (changed(selector_reason=["no"]), "selector_reason is a list"),
    ],
)
def test_an_odd_file_is_refused_in_one_line(tmp_path: Path, plain: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_explained(written(tmp_path, plain))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        read_explained(tmp_path / "none.json")


def test_whatever_a_file_holds_is_read_or_refused(tmp_path: Path) -> None:
    from cacheblend_rag.observe.explain_page import explain_page

    draw, kinds = random.Random(3), set()
    plain = json.loads(json.dumps(explained().to_dict()))
    for value in (*HOSTILE, *(mutated(plain, draw, deepest=50) for _ in range(300))):
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        try:
            explain_page(read_explained(written(tmp_path, text)))
            kinds.add("read")
        except ConfigError:
            kinds.add("refused")
    assert kinds == {"read", "refused"}
