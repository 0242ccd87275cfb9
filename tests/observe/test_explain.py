"""Explained prompts: a report's sentences, the page, and a prompt that is asked to be explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cacheblend_rag import BlendConfig, Chunk, Explanation, SamplingParams, TransformersEngine
from cacheblend_rag.observe.explain import Explained, explain_page, explain_prompt, token_texts
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.trace import Trace, TracedTokens
from tests.models import make_model, make_tokenizer, prompt_of, words
from tests.observe.explained_prompts import HOSTILE, Page, explained

FOUND = explained()
REPORT, TRACE = FOUND.report, FOUND.report.trace or Trace()
HIT = REPORT.chunks[0]

# A report's explanation


def test_each_chunk_says_what_became_of_it_and_why() -> None:
    missed = ChunkReport("b" * 32, 8, 3, False, Miss.NOT_STORED, edge_tokens=1)
    hit, edges, unreadable, gone = Explanation.of(
        replace(REPORT, chunks=(HIT, missed, *REPORT.chunks[1:]))
    ).chunks
    assert hit.why == (
        "reused from disk, 2 tokens recomputed by hkvd, ranks 1 to 2, "
        "1 token protected, since fresh KV would forget its document"
    )
    assert edges.why == (
        "computed: not stored; 1 token at its edges joined with the text beside it, computed"
    )
    assert unreadable.why == "computed: store error (word)"
    assert (edges.reason_code, gone.reason_code) == ("not_stored", "altered_text")
    assert (edges.marked, gone.marked) == ((), ())


def test_each_token_says_why_it_was_recomputed_or_not() -> None:
    first, kept, last = sorted(
        Explanation.of(REPORT).chunks[0].marked, key=lambda one: one.position
    )
    assert (first.position, first.fate, first.score, first.rank) == (3, "recomputed", 8.0, 1)
    assert first.deviation == 8.0
    assert (kept.position, kept.fate, kept.rank) == (4, "protected", None)
    assert (last.position, last.rank, last.deviation) == (5, 2, 2.0)


def test_tokens_are_marked_where_everything_was_recomputed() -> None:
    tokens = TracedTokens(1, (2, 3, 4, 5), (1.0,) * 4, (0.1, 0.2, 0.3, 0.4))
    told = Explanation.of(
        replace(
            REPORT,
            chunks=(replace(HIT, recomputed=4),),
            trace=Trace((), (4,), tokens=tokens),
        )
    )
    marked = told.chunks[0].marked
    assert [(one.fate, one.deviation) for one in marked] == [
        ("all", 0.1), ("all", 0.2), ("all", 0.3), ("all", 0.4),
    ]  # fmt: skip
    assert "every token was recomputed, so none was chosen by a score" in told.notes


def test_the_histogram_counts_every_candidate_once() -> None:
    choice = replace(TRACE.selections[0], value_deviations=(0.5, 8.0, 0.0))
    found = Explanation.of(replace(REPORT, trace=Trace((choice,)))).histogram
    assert found is not None
    assert (found.layer, found.zeros) == (1, 1)
    assert (found.bins[0].others, found.bins[-1].recomputed) == (1, 1)
    assert sum(one.others + one.recomputed for one in found.bins) == 2
    assert (found.bins[0].low, found.bins[-1].high) == (pytest.approx(0.5), pytest.approx(8.0))
    one = Explanation.of(replace(REPORT, trace=Trace(tokens=TracedTokens(1, (2,), (1.0,), (0.2,)))))
    assert one.histogram is not None
    assert sum(of.recomputed for of in one.histogram.bins) == 1
    assert all(of.low < of.high for of in one.histogram.bins)


def test_the_summary_says_what_it_cost_and_the_notes_what_is_missing() -> None:
    assert Explanation.of(REPORT).summary == (
        "Of 12 tokens, 2 were reused as stored, 2 recomputed (hkvd, ratio 0.5) and 8 computed: "
        "75.0 % of full prefill's work. First token after 1.000 s."
    )
    bare = Explanation.of(replace(REPORT, trace=None))
    assert any("BlendConfig(trace=True)" in note for note in bare.notes)
    assert bare.histogram is None
    reason = Reason(ReasonCode.TOO_SHORT, "9 reusable tokens are fewer than min_tokens=256")
    full = Explanation.of(
        replace(REPORT, blended=False, reason=reason, selector_reason=None, chunks=(), trace=None)
    )
    assert full.summary.startswith("Ordinary prefill computed 12 tokens: 9 reusable tokens")
    assert full.notes == ()


# The page


def test_the_page_shows_every_part() -> None:
    page = Page.of(explain_page(FOUND))
    bars = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", explain_page(FOUND))
    assert bars == [("0.00", "10.00"), ("10.00", "75.00"), ("85.00", "15.00")]
    for shown in (
        "Of 12 tokens, 2 were reused", "75.0 %", "notes.txt", "altered text",
        "store_error", "ranks 1 to 2", "How far fresh KV is from stored KV",
        "no prior stored for word", "0123456789abcdef", "recompute", "750.0 ms",
    ):  # fmt: skip
        assert shown in page.text, shown
    marks = [one["title"] for one in page.named("mark") if "title" in one]
    assert marks == [
        "token 3: recomputed, rank 1, score 8, deviation 8",
        "token 4: protected",
        "token 5: recomputed, rank 2, score 2, deviation 2",
    ]
    assert [one["class"] for one in page.named("mark")[2:]] == ["shade1", "protected", "shade2"]
    bars = [one["title"] for one in page.named("div") if one.get("class") == "bin"]
    assert len(bars) == 24
    assert bars[-1] == "7.1 to 8: 1 recomputed, 0 left as stored"
    prompt = page.text[page.text.index("stored KV", page.text.index("The prompt")) :]
    shown = re.findall(r"word\d+", prompt)
    assert shown == [f"word{at}" for at in range(12)]


def test_nothing_is_loaded_or_run() -> None:
    page = Page.of(explain_page(explained(HOSTILE, HOSTILE)))
    names = {name for name, _ in page.elements}
    assert not names & {
        "script", "iframe", "object", "embed", "form", "base", "img", "image", "use",
    }  # fmt: skip
    loads = {
        "src",
        "href",
        "srcset",
        "action",
        "formaction",
        "data",
        "poster",
        "background",
        "ping",
    }
    for name, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on"), (name, key)
            if key in loads or key.endswith(":href"):
                assert value == "data:,", (name, key, value)
    (policy,) = [one["content"] for one in page.named("meta") if "http-equiv" in one]
    assert (policy or "").startswith("default-src 'none'")


def test_hostile_text_is_text() -> None:
    source = explain_page(explained(HOSTILE, HOSTILE), title=HOSTILE)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", source)
    assert "<script" not in source
    (style,) = re.findall(r"<style>(.*?)</style>", source, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    page, clean = Page.of(source), HOSTILE.replace("\x1b", "").replace("\x00", "")
    assert page.text.count(f" {clean}3") == 1
    assert len(page.named("mark")) == len(Page.of(explain_page(FOUND)).named("mark"))


def test_of_a_report_without_a_trace_or_text_there_is_a_page_too() -> None:
    bare = Page.of(explain_page(Explained(replace(REPORT, trace=None, chunks=(), blended=False))))
    assert "The prompt holds no known chunk." in bare.text
    assert "How far fresh KV" not in bare.text
    assert (
        "word3" in Page.of(explain_page(replace(FOUND, report=replace(REPORT, trace=Trace())))).text
    )


# A prompt that is asked to be explained

CHUNKS = [Chunk(words(40, seed=seed)) for seed in (1, 2, 3)]
PROMPT = prompt_of("w9 w11", *CHUNKS, "w7 w8 w12")
CONFIG = BlendConfig(min_tokens=0, cost_model=False, recompute_ratio=0.1)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(make_model(), tokenizer=make_tokenizer(), config=CONFIG)
    engine.precompute(CHUNKS, progress=False)
    yield engine
    engine.close()


def test_it_is_asked_once_with_a_trace(engine: TransformersEngine) -> None:
    asked: list[object] = []
    engine.after_answer(lambda request, answer: asked.append(request) or answer)
    found = explain_prompt(engine, PROMPT)
    assert len(asked) == 1
    assert found.report.trace is not None
    assert found.answer == engine.generate(PROMPT, SamplingParams.greedy(max_tokens=16)).text
    plain = json.loads(json.dumps(found.to_dict()))
    assert len(plain["tokens"]) == plain["report"]["prompt_tokens"]
    assert len(plain["explanation"]["histogram"]["bins"]) == 24


def test_texts_of_tokens_are_the_prompt(engine: TransformersEngine) -> None:
    class Slow:
        decode = engine.tokenizer.decode

        def __call__(self, *_: object, **__: object) -> None:
            raise NotImplementedError  # it has no offsets

    prompt = engine.prepare(PROMPT)
    texts = token_texts(engine.tokenizer, prompt)
    assert "".join(texts) == prompt.text
    assert [one.strip() for one in texts] == prompt.text.split()
    assert token_texts(Slow(), prompt) == tuple(prompt.text.split())
