"""The page: what it shows, and that it can do nothing but be read."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cacheblend_rag import Explanation
from cacheblend_rag.observe.explain_page import explain_page, passages, waterfall
from cacheblend_rag.observe.explained import Explained
from cacheblend_rag.report import PhaseSeconds, PhaseStarts
from cacheblend_rag.trace import Trace
from tests.observe.explained_prompts import HOSTILE, Page, explained

LOADS = {"src", "href", "srcset", "action", "formaction", "data", "poster", "background", "ping"}


def test_the_page_shows_every_part() -> None:
    page = Page.of(explain_page(explained()))
    for shown in (
        "Of 12 tokens, 2 were reused", "4.0x", "0.1250", "75.0 %", "notes.txt", "altered text",
        "store_error", "ranks 1 to 2", "KV deviation", "Deviation by layer",
        "no prior stored for word", "0123456789abcdef",
    ):  # fmt: skip
        assert shown in page.text, shown
    marks = [one["title"] or "" for one in page.named("mark") if "title" in one]
    assert marks == [
        "token 3: recomputed, rank 1, score 8, deviation 8",
        "protected: keeps what its own document told it",
        "token 5: recomputed, rank 2, score 2, deviation 2",
    ]
    assert len(page.named("svg")) == 1
    whole = "".join(f" word{at}" for at in range(12))
    shown = re.sub(r"#\d .*?(?= word)|text, \d+ tokens?, computed", "", page.text)
    assert [one for one in re.findall(r"word\d+", shown) if one] == re.findall(r"word\d+", whole)


def test_nothing_is_loaded_or_run() -> None:
    page = Page.of(explain_page(explained(HOSTILE, HOSTILE)))
    names = {name for name, _ in page.elements}
    assert not names & {
        "script",
        "iframe",
        "object",
        "embed",
        "form",
        "base",
        "img",
        "image",
        "use",
    }
    for name, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on"), (name, key)
            if key in LOADS or key.endswith(":href"):
                assert value == "data:,", (name, key, value)
    (policy,) = [one["content"] for one in page.named("meta") if "http-equiv" in one]
    assert (policy or "").startswith("default-src 'none'")


def test_hostile_text_is_text() -> None:
    source = explain_page(explained(HOSTILE, HOSTILE), title=HOSTILE)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", source)
    assert "<script" not in source
    styles = re.findall(r"<style>(.*?)</style>", source, re.DOTALL)
    assert len(styles) == 1
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]
    page, clean = Page.of(source), HOSTILE.replace("\x1b", "").replace("\x00", "")
    assert page.text.count(f" {clean}3") == 1
    assert len(page.named("mark")) == len(Page.of(explain_page(explained())).named("mark"))


@pytest.mark.parametrize("text", ["\ud800", "\u202e", "日本", "\t\n"])
def test_any_text_can_be_written(text: str) -> None:
    assert explain_page(explained(text)).encode("utf-8", "replace")


def test_of_a_report_without_a_trace_or_text_there_is_a_page_too() -> None:
    found = explained()
    bare = Explained(replace(found.report, trace=None, chunks=(), blended=False))
    page = Page.of(explain_page(bare))
    assert "The prompt holds no known chunk." in page.text
    assert page.named("svg") == []
    assert passages(bare) == []
    empty = Explained(replace(found.report, trace=Trace()), found.tokens)
    assert "word3" in Page.of(explain_page(empty)).text


def test_bars_stand_where_their_phases_began_and_within_the_track() -> None:
    bars = {bar.phase.name: bar for bar in waterfall(explained().explanation)}
    assert set(bars) == {"load", "recompute", "first_token"}
    assert (bars["load"].left, bars["load"].width) == (pytest.approx(0), pytest.approx(10))
    assert (bars["recompute"].left, bars["recompute"].width) == (
        pytest.approx(10),
        pytest.approx(75),
    )
    late = replace(
        explained().report,
        seconds=PhaseSeconds(load=1.0),
        starts=PhaseStarts(load=9.0),
    )  # fmt: skip
    (bar,) = waterfall(Explanation.of(late))
    assert bar.left + bar.width <= 100


def test_shades_follow_the_ranks() -> None:
    (shown,) = [one for one in passages(explained()) if one.chunk and one.chunk.hit]
    assert [run.kind for run in shown.runs] == [
        "", "recomputed shade1", "protected", "recomputed shade2",
    ]  # fmt: skip
    assert [run.text for run in shown.runs] == [" word2", " word3", " word4", " word5"]
