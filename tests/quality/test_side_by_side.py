from __future__ import annotations

from types import SimpleNamespace

import pytest

from cacheblend_rag.demo.passages import PassageQuestion
from cacheblend_rag.quality.metrics import holds_answer
from cacheblend_rag.quality.side_by_side import Answers, totals_of


@pytest.mark.parametrize(
    ("answer", "golds", "held"),
    [
        ("It is named after Ernst Mach.", ["Ernst Mach"], True),
        ("the lungs", ["The Lungs"], True),
        ("Ernst said so to Mach", ["Ernst Mach"], False),
        ("Machine", ["Mach"], False),
        ("Triton", ["Nereid", "Triton"], True),
        ("", ["Triton"], False),
    ],
)
def test_an_answer_holds_gold_words_one_after_another(answer, golds, held):
    assert holds_answer(answer, golds) is held


def generation(text, seconds, reused=0):
    phases = SimpleNamespace(time_to_first_token=seconds)
    report = SimpleNamespace(
        seconds=phases, prompt_tokens=100, reused_tokens=reused, blended=reused > 0, reason="slow"
    )
    return SimpleNamespace(text=text, report=report)


def test_totals_are_medians_and_counts():
    asked = PassageQuestion("Which moon?", ("Triton",), "Neptune")
    answered = [
        Answers(
            asked,
            (),
            full=generation(f" {full}", seconds),
            reuse=generation(reuse, 0.5, reused),
            blend=generation(blend, 1.0, reused),
        )
        for full, reuse, blend, seconds, reused in [
            ("Triton", "Nereid", "Triton", 2.0, 90),
            ("Triton.", "Triton.", "Nereid", 4.0, 80),
            ("Nereid", "Nereid", "Pluto", 9.0, 0),
        ]
    ]
    totals = totals_of(answered)
    assert (totals["questions"], totals["full_right"]) == (3, 2)
    assert (totals["reuse_right"], totals["blend_right"]) == (1, 1)
    assert (totals["reuse_same"], totals["blend_same"]) == (2, 1)
    seconds = [totals[f"{way}_seconds"] for way in ("full", "reuse", "blend")]
    assert (seconds, totals["speedup"]) == ([4.0, 0.5, 1.0], 4.0)
    assert (totals["prompt_tokens"], totals["reused_tokens"]) == (100, 80)
    assert totals["not_blended"] == ["slow"]
