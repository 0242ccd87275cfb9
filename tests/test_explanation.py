"""Explanations of reports that are made by hand: each number can be counted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cacheblend_rag import Explanation
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport, PhaseSeconds, PhaseStarts
from cacheblend_rag.trace import Trace, TracedSelection, TracedTokens

HIT = ChunkReport("a" * 32, 2, 4, True, tier="disk", document_id="notes.txt", recomputed=2)
MISS = ChunkReport("b" * 32, 8, 3, False, Miss.NOT_STORED, edge_tokens=1)
GONE = ChunkReport("c" * 32, -1, 0, False, Miss.ALTERED_TEXT)
CHOICE = TracedSelection(
    1, (2, 3, 5), (1.0, 1.0, 1.0), (0.5, 8.0, 0.0), (0.5, 8.0, 2.0), (False, True, True)
)
TRACE = Trace((CHOICE,), (3, 3, 2), protected=(4,))
REPORT = BlendReport(
    "transformers", True, None, 14, 2, 2, 10, 0.5, "hkvd", "none", 0.75,
    PhaseSeconds(recompute=0.75, first_token=0.25, decode=4.0),
    chunks=(HIT, MISS, GONE), starts=PhaseStarts(recompute=0.0, first_token=0.75, decode=1.0),
    trace=TRACE,
)  # fmt: skip


def test_each_chunk_says_what_became_of_it_and_why() -> None:
    hit, miss, gone = Explanation.of(REPORT).chunks
    assert (hit.hit, hit.reason_code, hit.tier) == (True, None, "disk")
    assert hit.why == (
        "reused from disk, 2 tokens recomputed by hkvd, ranks 1 to 2, "
        "1 token protected, since fresh KV would forget its document"
    )
    assert miss.why == (
        "computed: not stored; 1 token at its edges joined with the text beside it, computed"
    )
    assert (miss.reason_code, gone.reason_code) == ("not_stored", "altered_text")
    assert (miss.marked, gone.marked) == ((), ())


def test_each_token_says_why_it_was_recomputed_or_not() -> None:
    (first, kept, last) = Explanation.of(REPORT).chunks[0].marked
    assert (first.position, first.fate, first.score, first.rank) == (3, "recomputed", 8.0, 1)
    assert first.deviation == 8.0
    assert (kept.position, kept.fate, kept.rank) == (4, "protected", None)
    assert (last.position, last.rank, last.deviation) == (5, 2, 0.0)


def test_tokens_are_marked_where_everything_was_recomputed() -> None:
    whole = replace(HIT, recomputed=4)
    tokens = TracedTokens(1, (2, 3, 4, 5), (1.0,) * 4, (0.1, 0.2, 0.3, 0.4))
    trace = Trace((), (4,), tokens=tokens)
    report = replace(REPORT, chunks=(whole,), reused_tokens=0, recomputed_tokens=4, trace=trace)
    told = Explanation.of(report)
    assert [one.fate for one in told.chunks[0].marked] == ["all"] * 4
    assert [one.deviation for one in told.chunks[0].marked] == [0.1, 0.2, 0.3, 0.4]
    assert "every token was recomputed, so none was chosen by a score" in told.notes


def test_after_several_check_layers_only_the_last_choice_counts() -> None:
    later = TracedSelection(2, (3, 5), scores=(1.0, 9.0), chosen=(False, True))
    trace = replace(TRACE, selections=(CHOICE, later))
    marked = Explanation.of(replace(REPORT, trace=trace)).chunks[0].marked
    chosen = [(one.position, one.rank) for one in marked if one.fate == "recomputed"]
    assert chosen == [(5, 1)]


def test_phases_are_those_that_can_begin_and_share_the_time_to_the_first_token() -> None:
    phases = {one.name: one for one in Explanation.of(REPORT).phases}
    assert (phases["recompute"].share, phases["first_token"].share) == (0.75, 0.25)
    assert (phases["decode"].share, phases["decode"].seconds) == (0.0, 4.0)
    assert phases["load"].start is None
    assert sum(one.share for one in phases.values()) == pytest.approx(1)


def test_the_histogram_counts_every_candidate_once() -> None:
    found = Explanation.of(REPORT).histogram
    assert found is not None
    assert (found.layer, found.zeros) == (1, 1)
    assert (sum(found.recomputed), sum(found.others)) == (1, 1)
    assert found.others[0] == found.recomputed[-1] == 1
    assert (found.edges[0], found.edges[-1]) == (pytest.approx(0.5), pytest.approx(8.0))


def test_of_one_deviation_there_is_a_histogram_too() -> None:
    tokens = TracedTokens(1, (2,), (1.0,), (0.25,))
    found = Explanation.of(replace(REPORT, trace=Trace(tokens=tokens))).histogram
    assert found is not None
    assert sum(found.recomputed) == 1
    assert list(found.edges) == sorted(set(found.edges))


def test_the_summary_says_what_it_cost_and_the_notes_what_is_missing() -> None:
    told = Explanation.of(REPORT)
    assert told.summary == (
        "Of 14 tokens, 2 were reused as stored, 2 recomputed (hkvd, ratio 0.5) and 10 computed: "
        "75.0 % of full prefill's work. First token after 1.000 s."
    )
    bare = Explanation.of(replace(REPORT, trace=None))
    assert any("BlendConfig(trace=True)" in note for note in bare.notes)
    assert bare.histogram is None
    reason = Reason(ReasonCode.TOO_SHORT, "9 reusable tokens are fewer than min_tokens=256")
    full = Explanation.of(replace(REPORT, blended=False, reason=reason, chunks=(), trace=None))
    assert (full.code, full.notes) == ("too_short", ())
    assert full.summary.startswith("Ordinary prefill computed 14 tokens: 9 reusable tokens")


def test_it_is_plain_data() -> None:
    plain = json.loads(json.dumps(Explanation.of(REPORT).to_dict()))
    assert plain["chunks"][0]["marked"][0]["position"] == 3
    assert plain["histogram"]["layer"] == 1
