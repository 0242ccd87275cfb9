"""What the doctor can find: a table of rules, the most serious first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from cacheblend_rag.reason import ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.settings.options import DEFAULT_RATIO

NOTICED = 0.05
"""Loss in nats per token that a ratio below the default must cost before it is named."""
TOO_MUCH = 0.25
"""Loss in nats per token that is too much at any ratio; `verify` has the same bound."""
FALLS_TO = 0.6
"""A higher ratio helps if it leaves at most this share of the loss."""
QUESTION_WORDS = 4
"""Fewer words after the last chunk are no question."""
SHORT_CHUNK = 0.5
"""A chunk of less than this share of the others' median length may be a question."""
MUCH_MISSED = 0.1
"""Share of a prompt whose KV must be missing for that to be a fault."""
SHORT_PROMPT = 1000
"""Tokens below which little can be gained."""
LEAST_GAIN = 1.5
"""A short prompt is a finding unless its first token comes this many times sooner."""
WAITS = 0.5
"""Share of a request's time to first token that it waits for one tier, for that tier to be slow."""
WORTH = 0.3
"""The wait is at least this share of full prefill, so that it costs much of the gain."""
CONFIRMED = 0.25
"""A tier is slow if reading the chunks once more takes at least this share of the wait."""
LATE = 0.5
"""Share of the layers from which on a check layer is late: all rows are computed up to it."""
MUCH_WORK = 0.5
"""Share of full prefill's work that leaves too little gain."""
MIB = 1 << 20

Symptom = Literal["quality", "memory", "time to first token"]
"""What a user notices: worse answers, no memory, or no gain in time."""
TIME: Symptom = "time to first token"
Figures = dict[str, float | int | str]


@dataclass(frozen=True)
class Trial:
    """A blended request with a trace, and its loss; None if unknown.

    loss: how much farther from the reference its predictions are than full prefill's, in nats per
    token.
    """

    report: BlendReport
    loss: float | None = None


@dataclass(frozen=True)
class Evidence:
    """All that was measured of one request.

    Args:
        config: in force.
        prompt_tokens: of the prompt.
        chunks: text of each chunk in it.
        chunk_tokens: how many tokens each has there.
        known_chunks: how many chunks are registered.
        respaced: beginnings of registered chunks that the prompt holds with other white space.
        after: the text after the last chunk.
        question: the question, if it is known.
        first: report of the first blended request; None if it found no memory.
        blends: reports of blended requests after it.
        fulls: reports of those by full prefill, in turn with ``blends``.
        in_force: a trial with ``config``.
        more: one at a higher ratio.
        less: one at a lower ratio.
        earlier: one with an earlier check layer.
        read_again: seconds to read the chunks once more, by tier of this process; 0 of memory.
        kept_bytes: chunk KV in memory.
        lack: the allocator's message, if a request found no memory at all.
    """

    config: BlendConfig
    prompt_tokens: int
    chunks: tuple[str, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    known_chunks: int = 0
    respaced: tuple[str, ...] = ()
    after: str = ""
    question: str = ""
    first: BlendReport | None = None
    blends: tuple[BlendReport, ...] = ()
    fulls: tuple[BlendReport, ...] = ()
    in_force: Trial | None = None
    more: Trial | None = None
    less: Trial | None = None
    earlier: Trial | None = None
    read_again: Mapping[str, float] = field(default_factory=dict)
    kept_bytes: int = 0
    lack: str | None = None

    @property
    def reports(self) -> tuple[BlendReport, ...]:
        """The reports of all blended requests."""
        return (*(() if self.first is None else (self.first,)), *self.blends)

    @property
    def missed(self) -> list[ChunkReport]:
        """The chunks that the first request did not reuse."""
        return [one for one in self.first.chunks if not one.hit] if self.first else []

    @property
    def is_blended(self) -> bool:
        """Whether a request reused a chunk."""
        return any(report.blended for report in self.reports)

    @property
    def full_seconds(self) -> float:
        """Median time to first token by full prefill; 0 if there was none."""
        return _median_ttft(self.fulls)

    @property
    def blend_seconds(self) -> float:
        """Median time to first token of blended requests; 0 if there was none."""
        return _median_ttft([report for report in self.blends if report.blended])

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the first request waited for stored KV, by tier.

        Looking chunks up counts as a wait for the slowest of them.
        """
        waits = dict(self.first.seconds.load_by_tier) if self.first else {}
        if self.first and waits:
            waits[max(waits, key=lambda tier: waits[tier])] += self.first.seconds.look_up
        return waits


def _median_ttft(reports: Sequence[BlendReport]) -> float:
    return median([one.seconds.time_to_first_token for one in reports] or [0.0])


@dataclass(frozen=True)
class SettingChange:
    """The setting to change: its name, the present value, the proposed one, the expected effect."""

    setting: str
    present: str
    proposed: str
    effect: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a request.

    Args:
        code: stable name; docs/troubleshooting.md lists them.
        symptom: what a user notices.
        sentence: what is wrong.
        evidence: what was measured, by name; the unit is part of the name.
        change: the one setting to change.
        is_fault: False if nothing is broken, so that the exit code of the command stays 0.
    """

    code: str
    symptom: Symptom
    sentence: str
    evidence: Figures
    change: SettingChange
    is_fault: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """A kind of finding; its texts name figures in braces.

    test: returns what was measured if the fault is there, else None. change: the fields of a
    SettingChange. is_fault: whether the finding is more than a note.
    """

    code: str
    symptom: Symptom
    test: Callable[[Evidence], Figures | None]
    sentence: str
    change: tuple[str, str, str, str]
    is_fault: Callable[[Evidence], bool] = lambda facts: True

    def finding(self, facts: Evidence) -> Finding | None:
        """Return the finding if the fault is there."""
        found = self.test(facts)
        if found is None:
            return None
        figures = {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in found.items()
        }
        sentence, *change = (text.format(**figures) for text in (self.sentence, *self.change))
        is_fault = self.is_fault(facts)
        return Finding(self.code, self.symptom, sentence, figures, SettingChange(*change), is_fault)


def examine(facts: Evidence) -> tuple[Finding, ...]:
    """Return all findings: faults first, then notes, each in the order of the table."""
    found = [one for rule in RULES if (one := rule.finding(facts)) is not None]
    return tuple(sorted(found, key=lambda one: not one.is_fault))


def _no_room(facts: Evidence) -> Figures | None:
    """Memory was short, for the request or for one of its chunks."""
    if facts.lack is None and all(one.reason_code != ReasonCode.NO_ROOM for one in facts.missed):
        return None
    said = (str(one.reason) for one in facts.reports if one.reason is not None)
    kept = facts.kept_bytes / MIB
    return {"allocator": facts.lack or next(said, "unknown"), "kept_mib": kept, "half": kept / 2}


def _question_registered(facts: Evidence) -> Figures | None:
    """The last chunk is a question, so its KV is reused although it must see the passages."""
    words_after = len(re.findall(r"\w+", facts.after))
    if not facts.chunks or words_after >= QUESTION_WORDS:
        return None
    last, tokens, others = facts.chunks[-1], facts.chunk_tokens[-1], facts.chunk_tokens[:-1]
    asked = facts.question.strip()
    is_short = bool(others) and tokens < SHORT_CHUNK * median(others)
    if not (is_short or last.rstrip().endswith("?") or (asked and asked in last)):
        return None
    return {
        "words_after_last_chunk": words_after,
        "last_chunk_tokens": tokens,
        "last_chunk": repr(last[:60]),
    }


def _ratio_too_low(facts: Evidence) -> Figures | None:
    now, more = facts.in_force, facts.more
    if now is None or more is None or now.loss is None or more.loss is None:
        return None
    ratio = now.report.recompute_ratio
    least = NOTICED if ratio < DEFAULT_RATIO else TOO_MUCH
    if now.loss < least or more.loss > FALLS_TO * now.loss:
        return None
    return {
        "recompute_ratio": ratio,
        "proposed": more.report.recompute_ratio,
        "loss_nats_per_token": now.loss,
        "loss_at_proposed": more.loss,
        "compute_share": now.report.compute_share,
        "compute_share_at_proposed": more.report.compute_share,
    }


def _predictions_differ(facts: Evidence) -> Figures | None:
    now, more = facts.in_force, facts.more
    if now is None or now.loss is None or now.loss < TOO_MUCH:
        return None
    figures: Figures = {"loss_nats_per_token": now.loss, "selector": facts.config.selector}
    if more is None or more.loss is None:
        return figures
    if more.loss <= FALLS_TO * now.loss:
        return None
    higher = more.report.recompute_ratio
    return {**figures, "higher_ratio": higher, "loss_at_higher_ratio": more.loss}


def _white_space_differs(facts: Evidence) -> Figures | None:
    if not facts.respaced:
        return None
    return {"chunks_in_other_form": len(facts.respaced), "registered": repr(facts.respaced[0])}


def _not_stored(facts: Evidence) -> Figures | None:
    missed = [one.tokens for one in facts.missed if one.reason_code in NOT_STORED]
    return {"chunks_missed": len(missed), "tokens_missed": sum(missed)} if missed else None


def _misses_much(facts: Evidence) -> bool:
    missed = sum(one.tokens for one in facts.missed if one.reason_code in NOT_STORED)
    return missed >= MUCH_MISSED * facts.prompt_tokens


def _no_known_chunk(facts: Evidence) -> Figures | None:
    reason = facts.first and facts.first.reason_code
    if facts.chunks or facts.respaced or reason != ReasonCode.NO_CHUNK:
        return None
    return {"known_chunks": facts.known_chunks, "prompt_tokens": facts.prompt_tokens}


def _prompt_too_short(facts: Evidence) -> Figures | None:
    tokens, blend, full = facts.prompt_tokens, facts.blend_seconds, facts.full_seconds
    is_refused = any(one.reason_code == ReasonCode.TOO_SHORT for one in facts.missed)
    if not is_refused and not (tokens < SHORT_PROMPT and 0 < full < LEAST_GAIN * blend):
        return None
    return {
        "prompt_tokens": tokens,
        "reusable_tokens": sum(facts.chunk_tokens),
        "min_tokens": facts.config.min_tokens,
        **({} if is_refused else {"full_seconds": full, "blend_seconds": blend}),
    }


def _tier_slow(facts: Evidence) -> Figures | None:
    """A request waits longer for stored KV than it computes."""
    waits, first = facts.waits, facts.first
    if first is None or not waits or not facts.full_seconds:
        return None
    tier = max(waits, key=lambda name: waits[name])
    seconds, total = waits[tier], first.seconds.time_to_first_token
    if seconds < WAITS * total or seconds < WORTH * facts.full_seconds:
        return None
    again = facts.read_again.get(tier, 0.0)
    if facts.read_again and again < CONFIRMED * seconds:
        return None  # a hiccup, or memory, which is not read again
    return {
        "tier": tier,
        "waited_seconds": seconds,
        "read_again_seconds": again,
        "first_token_seconds": total,
        "full_seconds": facts.full_seconds,
    }


def _check_layer_late(facts: Evidence) -> Figures | None:
    """All rows run up to a late check layer, whatever the ratio is."""
    now, other = facts.in_force, facts.earlier
    if now is None or other is None or now.report.trace is None:
        return None
    rows, choices = now.report.trace.rows, now.report.trace.selections
    layer = next((one.layer for one in choices if one.layer is not None), None)
    if layer is None or not rows or layer < LATE * len(rows):
        return None
    if now.report.compute_share < MUCH_WORK:
        return None
    return {
        "check_layer": layer,
        "check_layers": str(facts.config.check_layers),
        "layers": len(rows),
        "compute_share": now.report.compute_share,
        "compute_share_at_proposed": other.report.compute_share,
    }


def _ratio_too_high(facts: Evidence) -> Figures | None:
    now, less = facts.in_force, facts.less
    if now is None or less is None:
        return None
    ratio, share = now.report.recompute_ratio, now.report.compute_share
    if ratio < MUCH_WORK or share < MUCH_WORK:
        return None
    return {
        "recompute_ratio": ratio,
        "proposed": less.report.recompute_ratio,
        "compute_share": share,
        "compute_share_at_proposed": less.report.compute_share,
        "loss_nats_at_proposed": "unknown" if less.loss is None else f"{less.loss:.3f}",
    }


def _not_reused(facts: Evidence) -> Figures | None:
    """Chunks, or all of them, were not reused for a reason that no other rule is about."""
    told = TOLD | ({ReasonCode.ALTERED_TEXT} if facts.respaced else set())
    reasons = [*(one.reason for one in facts.missed), *(one.reason for one in facts.reports)]
    untold = {one.code: str(one) for one in reasons if one is not None and one.code not in told}
    if not untold:
        return None
    first = next(iter(untold))
    return {
        "reasons": ", ".join(untold),
        **{code.value: said for code, said in untold.items()},
        "remedy": REMEDIES.get(first, f"the row {first} under Reasons in docs/troubleshooting.md"),
    }


NOT_STORED = (ReasonCode.NOT_STORED, ReasonCode.BEING_FILLED)
TOLD = {*NOT_STORED, ReasonCode.NO_ROOM, ReasonCode.TOO_SHORT, ReasonCode.NO_CHUNK}
"""Reasons that other rules than `not_reused` are about."""
REMEDIES = {
    ReasonCode.GUARD_STOPPED: "a ratio that `cacheblend-rag tune` finds, then engine.reset_guard()",
    ReasonCode.STORE_ERROR: "the tier's server: start it, or leave this tier out of `tiers`",
    ReasonCode.DAMAGED: "the store: `precompute(verify=True)`, or `index --repair`",
    ReasonCode.BAD_SIGNATURE: "CACHEBLEND_MAC_KEY: the key that the chunks were stored with",
    ReasonCode.OTHER_MODEL: "model, instruction, lead-in and namespace: those of their index",
    ReasonCode.SLOW: "a faster tier for these chunks (host, device), or a lower recompute_ratio",
}
"""What to change for a reason."""
RULES = (
    Rule(
        "no_room", "memory", _no_room,
        "There was no memory for the prompt's KV.",
        ("host_bytes", "{kept_mib:,.0f} MiB in use",
         "{half:,.0f} MiB, engine.release(), or a shorter prompt", "the prompt's KV fits"),
    ),
    Rule(
        "question_registered", "quality", _question_registered,
        "The prompt ends with a registered chunk: the question's KV, computed without the "
        "passages, is reused.",
        ("registered chunks", "hold {last_chunk}", "only passages: evict_document() the question",
         "the question is computed in the prompt, and sees all passages"),
    ),
    Rule(
        "ratio_too_low", "quality", _ratio_too_low,
        "Too few tokens are recomputed: a higher ratio predicts more as full prefill does.",
        ("recompute_ratio", "{recompute_ratio:g}", "{proposed:g}",
         "the loss falls from {loss_nats_per_token:.3f} to {loss_at_proposed:.3f} nats per token"),
    ),
    Rule(
        "predictions_differ", "quality", _predictions_differ,
        "Predictions are far from full prefill's, and a higher ratio does not bring them nearer.",
        ("selector", "{selector}",
         "what `cacheblend-rag tune` finds; run `verify` on the model first",
         f"a loss below {TOO_MUCH:g} nats per token, or the advice not to blend this model"),
    ),
    Rule(
        "white_space_differs", TIME, _white_space_differs,
        "The prompt holds registered chunks with other white space: only runs of tokens are found.",
        ("white space of the prompt's template", "another", "that of {registered}",
         "{chunks_in_other_form} more chunks are found and reused whole"),
    ),
    Rule(
        "not_stored", TIME, _not_stored,
        "The KV of registered chunks in this prompt is not stored, so it is computed.",
        ("fill_on_miss", "off, or not done yet",
         "on, or run `precompute` (`index --repair`); more host_bytes or disk_bytes if chunks were "
         "evicted",
         "the chunks are reused"),
        is_fault=_misses_much,
    ),
    Rule(
        "no_known_chunk", TIME, _no_known_chunk,
        "The prompt holds no registered chunk, word for word.",
        ("registered chunks", "{known_chunks:,} are known",
         "those of this prompt: `precompute` them; give kv_path and namespace of their registry",
         "the chunks are found and reused"),
    ),
    Rule(
        "prompt_too_short", TIME, _prompt_too_short,
        f"The prompt is short: below about {SHORT_PROMPT:,} tokens there is little to gain.",
        ("tokens of the prompt", "{prompt_tokens:,}",
         f"more passages, from about {SHORT_PROMPT:,} tokens on; min_tokens stays",
         "prefill takes long enough for reuse to save time"),
    ),
    Rule(
        "tier_slow", TIME, _tier_slow,
        "A request waits for the tier {tier!r} longer than it computes.",
        ("tiers", "{tier!r}: {waited_seconds:.2f} s for this prompt's chunks",
         "a faster place for these chunks: host memory (host_bytes) or a local SSD",
         "up to {waited_seconds:.2f} s less to the first token"),
    ),
    Rule(
        "check_layer_late", TIME, _check_layer_late,
        "The check layer is {check_layer} of {layers} layers: every token is computed up to it.",
        ("check_layers", "{check_layers}", "(1,)",
         "rows are chosen after the first layer, compute_share {compute_share_at_proposed:.2f}"),
    ),
    Rule(
        "ratio_too_high", TIME, _ratio_too_high,
        "So many tokens are recomputed that little of full prefill's work is saved.",
        ("recompute_ratio", "{recompute_ratio:g}", "{proposed:g}",
         "{compute_share:.0%} of full prefill's work become {compute_share_at_proposed:.0%}, at a "
         "loss of {loss_nats_at_proposed} nats per token"),
    ),
    Rule(
        "not_reused", TIME, _not_reused,
        "Chunks of this prompt are not reused: {reasons}.",
        ("what the reason says", "{reasons}", "{remedy}", "the chunks are reused"),
        is_fault=lambda facts: not facts.is_blended,
    ),
)  # fmt: skip
"""The most serious first."""
