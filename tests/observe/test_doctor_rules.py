"""Each rule draws its finding from facts alone, and draws none at the edge of them."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, BlendReport, ChunkReport, Reason, ReasonCode
from cacheblend_rag.observe.rules import REMEDIES, RULES, TOLD, Evidence, Trial, examine
from cacheblend_rag.reason import Miss
from cacheblend_rag.report import PhaseSeconds
from cacheblend_rag.trace import Trace, TracedSelection


def seconds(load: float = 0.0, recompute: float = 0.2, tier: str = "disk") -> PhaseSeconds:
    return PhaseSeconds(load=load, recompute=recompute, load_by_tier={tier: load} if load else {})


def report(*, reason: Any = None, tier: str | None = "host", **changed: Any) -> BlendReport:
    chunks = [ChunkReport(str(at), 350 * at, 350, reason is None, reason, tier) for at in range(3)]
    given: dict[str, Any] = {
        "engine": "transformers",
        "blended": reason is None,
        "reason": None if reason is None else Reason(ReasonCode.NO_CHUNK, "none"),
        "prompt_tokens": 1200,
        "reused_tokens": 966,
        "recomputed_tokens": 84,
        "computed_tokens": 150,
        "recompute_ratio": 0.08,
        "selector": "question_mid",
        "lead_in": "document",
        "compute_share": 0.2,
        "seconds": seconds(),
        "chunks": tuple(chunks),
    }
    return BlendReport(**{**given, **changed})


def trial(loss: float, ratio: float = 0.08, share: float = 0.2, **changed: Any) -> Trial:
    return Trial(report(recompute_ratio=ratio, compute_share=share, **changed), loss)


HEALTHY = Evidence(
    BlendConfig(),
    prompt_tokens=1200,
    chunks=("one passage", "another passage", "a third passage"),
    chunk_tokens=(350, 350, 350),
    known_chunks=9,
    after="\n\nQuestion: Who lives in Rome?\nAnswer:",
    first=report(),
    blends=(report(), report()),
    fulls=(report(seconds=seconds(recompute=1.0)),) * 2,
    in_force=trial(0.02),
)


def codes(evidence: Evidence) -> list[str]:
    return [finding.code for finding in examine(evidence)]


def of(**changed: Any) -> Evidence:
    return replace(HEALTHY, **changed)


def missing(reason: Any, tier: str | None = None, **changed: Any) -> Evidence:
    missed = report(reason=reason, tier=tier)
    return of(first=missed, blends=(missed,), in_force=None, **changed)


SLOW = report(seconds=seconds(load=0.6), tier="disk")
LATE = Trace(
    selections=(TracedSelection(3, (1, 2), scores=(0.0, 1.0), chosen=(False, True)),),
    rows=(9, 9, 9, 9, 1, 1),
)
CHECKED = {"config": BlendConfig(check_layers=(3,)), "earlier": trial(0.02, 0.1, 0.3)}
PLANTED: dict[str, Evidence] = {
    "no_room": missing(Miss.NO_ROOM, kept_bytes=64 << 20),
    "question_registered": of(chunk_tokens=(350, 350, 9), after=" "),
    "ratio_too_low": of(in_force=trial(0.12, 0.01), more=trial(0.03, 0.16)),
    "predictions_differ": of(in_force=trial(0.5), more=trial(0.4, 0.16)),
    "white_space_differs": of(chunks=(), respaced=("a {b} c",)),
    "not_stored": missing(Miss.NOT_STORED),
    "no_known_chunk": of(
        chunks=(), first=report(reason=Miss.NOT_STORED, chunks=()), blends=(), in_force=None
    ),
    "prompt_too_short": missing(Miss.TOO_SHORT),
    "tier_slow": of(first=SLOW, read_again={"disk": 0.5}),
    "check_layer_late": of(in_force=trial(0.02, 0.1, 0.7, trace=LATE), **CHECKED),
    "ratio_too_high": of(in_force=trial(0.0, 0.9, 0.92), less=trial(0.03)),
    "not_reused": missing(Miss.INSEPARABLE),
}


def test_every_rule_is_planted_and_documented_in_its_order() -> None:
    codes = [rule.code for rule in RULES]
    assert list(PLANTED) == codes
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert set(codes) <= set(re.findall(r"`(\w+)`", page.partition("## Reasons")[0]))


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_fault_is_found_alone_and_says_what_to_change(code: str) -> None:
    (found,) = examine(PLANTED[code])
    assert found.code == found.to_dict()["code"] == code
    assert found.sentence.endswith(".")
    assert found.evidence
    assert all(getattr(found.change, one.name) for one in fields(found.change))
    assert found.change.present != found.change.proposed


def test_nothing_is_found_in_healthy_facts() -> None:
    assert codes(HEALTHY) == []


@pytest.mark.parametrize("code", REMEDIES)
def test_a_reason_is_told_with_what_to_change(code: ReasonCode) -> None:
    assert code not in TOLD
    (found,) = examine(missing(Reason(code, "a sentence")))
    assert (found.code, found.evidence[code]) == ("not_reused", "a sentence")
    assert found.change.proposed == REMEDIES[code]


EDGES: dict[str, Evidence] = {
    "a loss that a higher ratio leaves": of(in_force=trial(0.12, 0.01), more=trial(0.1, 0.16)),
    "a small loss": of(in_force=trial(0.04, 0.01), more=trial(0.0, 0.16)),
    "a loss at the default ratio": of(in_force=trial(0.2), more=trial(0.05, 0.16)),
    "an early check layer": of(
        in_force=trial(0.02, 0.1, 0.7, trace=replace(LATE, rows=(9,) * 8)), **CHECKED
    ),
    "a late check layer that costs little": of(
        in_force=trial(0.02, 0.1, 0.3, trace=LATE), **CHECKED
    ),
    "a wait that was a hiccup": of(first=SLOW, read_again={"disk": 0.01}),
    "a wait for memory": of(
        first=report(seconds=seconds(load=0.6, tier="host")), read_again={"host": 0.0}
    ),
    "a wait that is short beside full prefill": of(
        first=SLOW, fulls=(report(seconds=seconds(recompute=9.0)),)
    ),
    "a short prompt with a gain": of(prompt_tokens=700),
    "a long last chunk, and no question": of(after="\n\nAnswer:"),
}


@pytest.mark.parametrize("edge", EDGES)
def test_nothing_is_found_in(edge: str) -> None:
    assert codes(EDGES[edge]) == []


def test_findings_are_ordered_by_severity_notes_last() -> None:
    lost = ChunkReport("2", 700, 40, False, Miss.NOT_STORED)
    first = replace(report(), chunks=(*report().chunks[:2], lost))
    found = examine(of(first=first, in_force=trial(0.5), respaced=("a b",)))
    assert [one.code for one in found] == [
        "predictions_differ", "white_space_differs", "not_stored",
    ]  # fmt: skip
    assert [one.is_fault for one in found] == [True, True, False]


def test_a_request_without_any_memory_is_found() -> None:
    assert codes(of(first=None, blends=(), in_force=None, lack="out of memory")) == ["no_room"]


def test_a_higher_ratio_is_advised_at_the_default_only_if_much_is_lost() -> None:
    (found,) = examine(of(in_force=trial(0.6), more=trial(0.1, 0.16)))
    assert (found.code, found.change.proposed) == ("ratio_too_low", "0.16")
