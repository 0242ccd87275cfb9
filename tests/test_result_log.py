"""A log of results is kept as JSON lines, and goes on after an interruption."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.result_log import ResultLog


@dataclass(frozen=True)
class Number:
    number: int


class Numbers(ResultLog[Number]):
    work, kind = "count", Number


def test_results_are_there_again_whatever_the_order_of_a_keys_fields(tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    log = Numbers.resumed(path)
    log.put({"a": 1, "b": [2]}, Number(10))
    log.put({"a": 2, "b": [2]}, Number(20))
    assert [json.loads(line)["record"] for line in path.read_text().splitlines()] == [
        {"number": 10},
        {"number": 20},
    ]
    again = Numbers.resumed(path)
    assert again.get({"b": [2], "a": 1}) == Number(10)
    assert again.get({"a": 3}) is None
    assert list(again) == [Number(10), Number(20)]


def test_a_line_that_was_not_finished_is_dropped(tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    Numbers.resumed(path).put({"a": 1}, Number(10))
    whole = path.read_text()
    path.write_text(whole + whole[:9])
    log = Numbers.resumed(path)
    assert list(log) == [Number(10)]
    log.put({"a": 2}, Number(20))
    assert list(Numbers.resumed(path)) == [Number(10), Number(20)]


def test_without_a_file_results_are_in_memory() -> None:
    log = Numbers()
    log.put({"a": 1}, Number(10))
    assert log.get({"a": 1}) == Number(10)


@pytest.mark.parametrize("line", ["{}", "no", '{"key": {}, "record": {"number": "x"}}'])
def test_anything_else_is_named_with_its_line(tmp_path, line: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DatasetError, match="line 1 is not a result of this count"):
        Numbers.resumed(path)


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Numbers.resumed(tmp_path / "nowhere" / "results.jsonl")
