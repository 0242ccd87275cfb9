"""Each rule draws its finding from facts alone, and draws none at the edge of them."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, BlendReport, ChunkReport, Reason, ReasonCode
from cacheblend_rag.observe.evidence import Evidence, MemoryFacts, PromptFacts, TierFacts, Trial
from cacheblend_rag.observe.machine import CpuLoad
from cacheblend_rag.observe.rules import RULES, TOLD, examine
from cacheblend_rag.observe.similar import SimilarChunk
from cacheblend_rag.quality.verify import Check, Verdict
from cacheblend_rag.reason import Miss
from cacheblend_rag.report import PhaseSeconds
from cacheblend_rag.trace import Trace, TracedSelection

PROMPT = PromptFacts(
    tokens=1200,
    chunks=("one passage", "another passage", "a third passage"),
    chunk_tokens=(350, 350, 350),
    known_chunks=9,
    before="Read the notes.\n\n",
    after="\n\nQuestion: Who lives in Rome?\nAnswer:",
    instruction="Read the notes.\n\n",
)
QUIET = CpuLoad(own=0.5, other=0.02, steal=0.0, idle=0.48)
BUSY = CpuLoad(own=0.3, other=0.7, steal=0.0, idle=0.0)
MIB = 1 << 20


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
    PROMPT,
    BlendConfig(),
    first=report(),
    blends=(report(), report()),
    fulls=(report(seconds=seconds(recompute=1.0)),) * 2,
    in_force=trial(0.02),
    load=QUIET,
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
SIMILAR = SimilarChunk("a", "white space", 1.0, "a b", "a\nb")
SOONER = replace(report(reason=Miss.SLOW), reason=Reason(ReasonCode.SLOW, "3 ms"))
PASSES = Verdict("toy", "transformers", "float32", "cpu", ())
FAILS = replace(PASSES, checks=(Check("stored KV", "failed", "off"),))
CHECKED = {"config": BlendConfig(check_layers=(3,)), "earlier": trial(0.02, 0.1, 0.3)}
NO_CHUNKS = replace(PROMPT, chunks=())
PLANTED: dict[str, Evidence] = {
    "model_fails_verify": of(verdict=FAILS),
    "cannot_be_blended": of(
        refusal=Reason(ReasonCode.UNSUPPORTED_LAYERS, "no"), first=None, blends=(), in_force=None
    ),
    "no_room": missing(Miss.NO_ROOM),
    "question_registered": of(prompt=replace(PROMPT, chunk_tokens=(350, 350, 9), after=" ")),
    "other_instruction": of(prompt=replace(PROMPT, before="Be {brief}.\n\n")),
    "ratio_too_low": of(in_force=trial(0.12, 0.01), more=trial(0.03, 0.16)),
    "predictions_differ": of(in_force=trial(0.5), more=trial(0.4, 0.16)),
    "guard_stopped": missing(Miss.GUARD_STOPPED),
    "tier_fails": missing(Miss.STORE_ERROR, "redis"),
    "damaged": missing(Miss.DAMAGED),
    "bad_signature": missing(Miss.BAD_SIGNATURE),
    "other_model": missing(Miss.OTHER_MODEL),
    "white_space_differs": of(prompt=NO_CHUNKS, similar=(SIMILAR,)),
    "text_differs": of(prompt=NO_CHUNKS, similar=(replace(SIMILAR, differs="text"),)),
    "not_stored": missing(Miss.NOT_STORED),
    "no_known_chunk": of(prompt=NO_CHUNKS, first=None, in_force=None),
    "prompt_too_short": missing(Miss.TOO_SHORT),
    "machine_busy": of(load=BUSY),
    "tier_slow": of(first=SLOW, tiers={"disk": TierFacts(read_seconds=0.5, read_bytes=9)}),
    "check_layer_late": of(in_force=trial(0.02, 0.1, 0.7, trace=LATE), **CHECKED),
    "ratio_too_high": of(in_force=trial(0.0, 0.9, 0.92), less=trial(0.03)),
    "prefill_sooner": of(blends=(report(), SOONER), in_force=None),
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


OF_REQUESTS = set(ReasonCode) - {
    # of precompute
    "store_full", "read_only", "too_long", "empty", "not_finite", "forgotten", "model_changed",
    # of a selector or a ratio, on the way to a blend
    "context_kept", "exact", "no_prior", "some_slow", "ratio_measured", "ratio_unmeasured",
    "guard_raised",
    # what `prefill_sooner` and `no_known_chunk` are about, by other facts
    "slow", "no_chunk",
}  # fmt: skip


@pytest.mark.parametrize("code", sorted(OF_REQUESTS))
def test_every_reason_that_a_request_can_meet_is_told(code: ReasonCode) -> None:
    found = examine(missing(Reason(code, "a sentence")))
    assert found
    assert (found[0].evidence.get(code) == "a sentence") == (code not in TOLD)


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
    "a wait that was a hiccup": of(
        first=SLOW, tiers={"disk": TierFacts(read_seconds=0.01, read_bytes=9)}
    ),
    "a wait for memory": of(
        first=report(seconds=seconds(load=0.6, tier="host")),
        tiers={"host": TierFacts(read_bytes=9)},
    ),
    "a wait that is short beside full prefill": of(
        first=SLOW, fulls=(report(seconds=seconds(recompute=9.0)),)
    ),
    "others at work, but idle CPUs": of(load=replace(BUSY, idle=0.5)),
    "a short prompt with a gain": of(prompt=replace(PROMPT, tokens=700)),
    "more text before the first chunk": of(
        prompt=replace(PROMPT, before="Read the notes.\n\nContext:\n")
    ),
    "an instruction that no chunk was computed after": of(
        prompt=replace(PROMPT, before="Be brief.", lead_in="bos")
    ),
    "a long last chunk, and no question": of(prompt=replace(PROMPT, after="\n\nAnswer:")),
    "a model that passes": of(verdict=PASSES),
}


@pytest.mark.parametrize("edge", EDGES)
def test_nothing_is_found_in(edge: str) -> None:
    assert codes(EDGES[edge]) == []


def test_a_busy_machine_silences_what_times_say_and_nothing_else() -> None:
    silenced = ("tier_slow", "prefill_sooner")
    for code, evidence in PLANTED.items():
        expected = ["machine_busy"] if code in silenced else sorted({code, "machine_busy"})
        assert sorted(codes(replace(evidence, load=BUSY))) == expected


def test_findings_are_ordered_by_severity_notes_last() -> None:
    lost = ChunkReport("2", 700, 40, False, Miss.NOT_STORED)
    first = replace(report(), chunks=(*report().chunks[:2], lost))
    found = examine(of(first=first, load=BUSY, prompt=replace(PROMPT, before="Be brief.")))
    assert [one.code for one in found] == ["other_instruction", "machine_busy", "not_stored"]
    assert [one.is_fault for one in found] == [True, True, False]


@pytest.mark.parametrize(
    ("kept", "setting", "proposed"),
    [(1024 * MIB, "host_bytes", "824 MiB"), (50 * MIB, "tokens of the prompt", "400")],
)
def test_what_to_lower_is_the_memory_for_chunks_if_that_is_enough(
    kept: int, setting: str, proposed: str
) -> None:
    facts = MemoryFacts(needed=300 * MIB, available=100 * MIB, kept=kept)
    (found,) = examine(missing(Miss.NO_ROOM, memory=facts))
    assert (found.change.setting, found.change.proposed) == (setting, proposed)


def test_a_request_without_any_memory_is_found() -> None:
    evidence = of(first=None, blends=(), in_force=None, memory=MemoryFacts(lack="out of memory"))
    assert codes(evidence)[0] == "no_room"


def test_a_higher_ratio_is_advised_at_the_default_only_if_much_is_lost() -> None:
    (found,) = examine(of(in_force=trial(0.6), more=trial(0.1, 0.16)))
    assert (found.code, found.change.proposed) == ("ratio_too_low", "0.16")


def test_a_failing_tier_is_named_though_others_had_the_chunks() -> None:
    (found,) = examine(of(tiers={"host": TierFacts(), "redis": TierFacts(errors=2)}))
    assert (found.code, found.evidence["redis_errors"]) == ("tier_fails", 2)
