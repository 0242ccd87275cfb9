from __future__ import annotations

from collections.abc import Iterator

import pytest

from cacheblend_rag import Chunk
from llama_index.llms.cacheblend.hints import Hint, expect, hints_in

ONE = "The first passage tells of Clara Berg, who lives in Paris and plays the cello every day."
TWO = "The second passage tells of Oscar Lund, who works as a baker and was born in Oslo in 1950."


def hinted(text: str, head: str = "") -> Hint:
    return (Chunk(f"{head}{text}", "d"), Chunk(text, "d"))


@pytest.fixture(autouse=True)
def _nothing_expected() -> Iterator[None]:
    expect(())
    yield
    expect(())


def test_chunks_that_stand_in_the_prompt_are_hinted() -> None:
    expect([hinted(ONE, "page: 1\n\n"), hinted(TWO, "page: 2\n\n")])
    assert hints_in(f"Read:\npage: 1\n\n{ONE}\n\nQuestion") == [Chunk(f"page: 1\n\n{ONE}", "d")]
    assert hints_in(f"Source 1:\n{TWO}\n") == [Chunk(TWO, "d")]
    assert hints_in("A prompt of another call.") == []


def test_a_cut_chunk_is_hinted_whole_so_that_the_report_names_it() -> None:
    expect([hinted(ONE), hinted(TWO)])
    assert hints_in(f"{ONE}\n\n{TWO[:60]}") == [Chunk(ONE, "d"), Chunk(TWO, "d")]


def test_overlap_with_a_neighbour_is_no_cut() -> None:
    overlapping = f"{ONE[-60:]} {TWO}"
    expect([hinted(ONE), hinted(overlapping)])
    assert hints_in(f"Read:\n{ONE}\n\nQuestion") == [Chunk(ONE, "d")]
