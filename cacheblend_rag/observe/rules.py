"""What the doctor can find: a table of rules, the most serious first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from cacheblend_rag.observe.evidence import Evidence, waited
from cacheblend_rag.reason import ReasonCode
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
Test = Callable[[Evidence], Figures | None]
"""Returns what was measured if a fault is there, else None."""


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

    change: the fields of a SettingChange. is_fault: whether the finding is more than a note.
    """

    code: str
    symptom: Symptom
    test: Test
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


def _missed(*codes: ReasonCode) -> Test:
    """Return a test for chunks that the first request missed for one of these reasons."""

    def test(facts: Evidence) -> Figures | None:
        missed = [chunk.tokens for chunk in facts.chunks if chunk.reason_code in codes]
        told: Figures = {"chunks_missed": len(missed), "tokens_missed": sum(missed)}
        return told if missed else None

    return test


def _quoted(text: str, most: int = 60) -> str:
    """Return the beginning of a text as a Python string, in one line."""
    return repr(text if len(text) <= most else f"{text[: most - 3]}...")


def _fails_verify(facts: Evidence) -> Figures | None:
    if facts.verdict is None or facts.verdict.passed:
        return None
    failed = {check.name: check.found for check in facts.verdict.failed}
    return {"checks": ", ".join(failed), **failed, "advice": facts.verdict.advice}


def _cannot_be_blended(facts: Evidence) -> Figures | None:
    why = facts.refusal
    return None if why is None else {"reason": str(why), "reason_code": why.code.value}


def _no_room(facts: Evidence) -> Figures | None:
    """Memory was short; less chunk KV in memory makes room if there is as much, else a prompt."""
    memory, tokens = facts.memory, facts.prompt.tokens
    missed = _missed(ReasonCode.NO_ROOM)(facts)
    if missed is None and memory.lack is None:
        return None
    short = max(memory.needed - memory.available, 0) or memory.needed
    fitting = int(tokens * memory.available / (memory.needed or 1))
    change = {
        "to_lower": "tokens of the prompt",
        "present": f"{tokens:,}",
        "proposed": f"{fitting if 0 < fitting < tokens else tokens // 2:,}",
    }
    if 0 < short <= memory.kept:
        kept, less = memory.kept / MIB, (memory.kept - short) / MIB
        change = {"to_lower": "host_bytes", "present": f"{kept:,.0f} MiB in use"}
        change |= {"proposed": f"{less:,.0f} MiB"}
    said = (str(one.reason) for one in facts.reports if one.reason is not None)
    return {
        "allocator": memory.lack or next(said, "unknown"),
        "needed_bytes": memory.needed,
        "available_bytes": memory.available,
        "kept_bytes": memory.kept,
        **change,
    }


def _question_registered(facts: Evidence) -> Figures | None:
    """The last chunk is a question, so its KV is reused although it must see the passages."""
    prompt = facts.prompt
    if not prompt.chunks or prompt.words_after >= QUESTION_WORDS:
        return None
    last, others = prompt.chunks[-1], prompt.chunk_tokens[:-1]
    asked = prompt.question.strip()
    is_short = bool(others) and prompt.chunk_tokens[-1] < SHORT_CHUNK * median(others)
    if not (is_short or last.rstrip().endswith("?") or (asked and asked in last)):
        return None
    return {
        "words_after_last_chunk": prompt.words_after,
        "last_chunk_tokens": prompt.chunk_tokens[-1],
        "last_chunk": _quoted(last),
    }


def _other_instruction(facts: Evidence) -> Figures | None:
    prompt = facts.prompt
    loss = None if facts.in_force is None else facts.in_force.loss
    expected = prompt.instruction.strip()
    uses_it = prompt.lead_in in ("instruction", "document")
    if not (facts.is_blended and uses_it and expected):
        return None
    if prompt.before.strip().startswith(expected):
        return None
    return {
        "computed_after": _quoted(prompt.instruction),
        "prompt_begins": _quoted(prompt.before),
        **({} if loss is None else {"loss_nats_per_token": loss}),
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
    return {
        **figures,
        "higher_ratio": more.report.recompute_ratio,
        "loss_at_higher_ratio": more.loss,
    }


def _tier_fails(facts: Evidence) -> Figures | None:
    of_store = [one for one in facts.chunks if one.reason_code == ReasonCode.STORE_ERROR]
    missed = [one.tier or "unknown" for one in of_store]
    failing = {name: one for name, one in facts.tiers.items() if one.errors or one.skipped}
    names = sorted({*missed, *failing})
    if not names:
        return None
    figures: Figures = {"tier": names[0], "chunks_missed": len(missed)}
    for name, tier in failing.items():
        figures |= {f"{name}_errors": tier.errors, f"{name}_skipped": tier.skipped}
    return figures


def _similar(differs: str) -> Test:
    """Return a test for chunks that the prompt holds in a form that differs in this."""

    def test(facts: Evidence) -> Figures | None:
        similar = [one for one in facts.similar if one.differs == differs]
        if not similar:
            return None
        altered = [one.altered for one in facts.chunks if one.altered]
        return {
            **({"altered": altered[0]} if altered else {}),
            "chunks_found": len(facts.prompt.chunks),
            "chunks_in_other_form": len(similar),
            "shared_runs_of_words": median(one.share for one in similar),
            "registered": repr(similar[0].registered),
            "in_prompt": repr(similar[0].found),
        }

    return test


def _misses_much(facts: Evidence) -> bool:
    missed = sum(chunk.tokens for chunk in facts.chunks if chunk.reason_code in NOT_STORED)
    return missed >= MUCH_MISSED * facts.prompt.tokens


def _no_known_chunk(facts: Evidence) -> Figures | None:
    prompt = facts.prompt
    if prompt.chunks or facts.chunks or facts.similar or facts.refusal is not None:
        return None
    return {"known_chunks": prompt.known_chunks, "prompt_tokens": prompt.tokens}


def _prompt_too_short(facts: Evidence) -> Figures | None:
    tokens, blend, full = facts.prompt.tokens, facts.blend_seconds, facts.full_seconds
    gains_little = facts.is_quiet and blend > 0 and full < LEAST_GAIN * blend
    is_refused = any(one.reason_code == ReasonCode.TOO_SHORT for one in facts.chunks)
    if not is_refused and not (tokens < SHORT_PROMPT and gains_little):
        return None
    return {
        "prompt_tokens": tokens,
        "reusable_tokens": sum(facts.prompt.chunk_tokens),
        "min_tokens": facts.config.min_tokens,
        **({} if is_refused else {"full_seconds": full, "blend_seconds": blend}),
    }


def _machine_busy(facts: Evidence) -> Figures | None:
    load = facts.load
    if load is None or not load.is_busy:
        return None
    return {f"{name}_cpu_share": share for name, share in asdict(load).items()}


def _tier_slow(facts: Evidence) -> Figures | None:
    """A request waits longer for stored KV than it computes."""
    first = facts.first
    if first is None or not first.blended or not facts.is_quiet or not facts.full_seconds:
        return None
    waits = waited(first)
    tier = max(waits, key=lambda name: waits[name], default="")
    seconds, total = waits.get(tier, 0.0), first.seconds.time_to_first_token
    if seconds < WAITS * total or seconds < WORTH * facts.full_seconds:
        return None
    slow = facts.tiers.get(tier)
    if slow is not None and (slow.read_seconds or 0.0) < CONFIRMED * seconds:
        return None  # a hiccup, or memory, which is not read again
    figures: Figures = {"tier": tier, "waited_seconds": seconds}
    figures |= {f"waited_seconds_{name}": waits[name] for name in sorted(waits)}
    if slow is not None:
        figures |= {"bytes": slow.read_bytes, "read_again_seconds": slow.read_seconds or 0.0}
    return {**figures, "first_token_seconds": total, "full_seconds": facts.full_seconds}


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


def _prefill_sooner(facts: Evidence) -> Figures | None:
    told = next((one.reason for one in facts.reports if one.reason_code == ReasonCode.SLOW), None)
    if told is None or not facts.is_quiet:
        return None
    return {"measured": str(told), "prompt_tokens": facts.prompt.tokens}


def _not_reused(facts: Evidence) -> Figures | None:
    """Chunks, or all of them, were not reused for a reason that no other rule is about."""
    told = TOLD | ({ReasonCode.ALTERED_TEXT} if facts.similar else set())
    reasons = [*(one.reason for one in facts.chunks), *(one.reason for one in facts.reports[:1])]
    untold = {one.code: str(one) for one in reasons if one is not None and one.code not in told}
    if not untold or facts.refusal is not None:
        return None
    return {"reasons": ", ".join(untold), **{code.value: said for code, said in untold.items()}}


NOT_STORED = (ReasonCode.NOT_STORED, ReasonCode.BEING_FILLED)
TOLD = frozenset(
    {
        *NOT_STORED, ReasonCode.NO_ROOM, ReasonCode.GUARD_STOPPED, ReasonCode.STORE_ERROR,
        ReasonCode.DAMAGED, ReasonCode.BAD_SIGNATURE, ReasonCode.OTHER_MODEL, ReasonCode.TOO_SHORT,
        ReasonCode.SLOW, ReasonCode.NO_CHUNK,
    }
)  # fmt: skip
"""Reasons that other rules than `not_reused` are about."""
RULES = (
    Rule(
        "model_fails_verify", "quality", _fails_verify,
        "The model fails the checks of `verify` ({checks}): its blended answers are not reliable.",
        ("model", "blended", "ordinary prefill, or another model", "{advice}"),
    ),
    Rule(
        "cannot_be_blended", TIME, _cannot_be_blended,
        "This engine serves every prompt by ordinary prefill.",
        ("model", "cannot be blended", "another model or server", "chunks are reused"),
    ),
    Rule(
        "no_room", "memory", _no_room,
        "There was no memory for the prompt's KV.",
        ("{to_lower}", "{present}", "{proposed}", "the prompt's KV fits the memory"),
    ),
    Rule(
        "question_registered", "quality", _question_registered,
        "The prompt ends with a registered chunk: the question's KV, computed without the "
        "passages, is reused.",
        ("registered chunks", "hold {last_chunk}", "only passages: evict_document() the question",
         "the question is computed in the prompt, and sees all passages"),
    ),
    Rule(
        "other_instruction", "quality", _other_instruction,
        "The chunks' KV was computed after another instruction than this prompt begins with.",
        ("instruction", "{computed_after}", "{prompt_begins}",
         "chunks are computed after the prompt's own beginning: index again with it"),
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
        "guard_stopped", "quality", _missed(ReasonCode.GUARD_STOPPED),
        "The guard has stopped blending, since answers diverged too far from full prefill.",
        ("recompute_ratio", "the one in force",
         "what `cacheblend-rag tune` finds, then engine.reset_guard()",
         "blending goes on, with answers near full prefill's"),
    ),
    Rule(
        "tier_fails", TIME, _tier_fails,
        "The tier {tier!r} of the store cannot be used, and is skipped.",
        ("tiers", "{tier!r} fails", "start the server of {tier!r}, or leave this tier out",
         "its chunks are found again, and no request waits for its timeout"),
    ),
    Rule(
        "damaged", TIME, _missed(ReasonCode.DAMAGED),
        "Stored KV of the prompt's chunks is damaged.",
        ("store", "holds damaged chunks", "`precompute(verify=True)`, or `index --repair`",
         "the chunks are reused"),
    ),
    Rule(
        "bad_signature", TIME, _missed(ReasonCode.BAD_SIGNATURE),
        "Stored KV of the prompt's chunks has no signature, or one of another key.",
        ("CACHEBLEND_MAC_KEY", "another key", "the key that the chunks were stored with",
         "the chunks are reused"),
    ),
    Rule(
        "other_model", TIME, _missed(ReasonCode.OTHER_MODEL),
        "The store holds these chunks as another model, tokenizer, instruction, lead-in or "
        "namespace computed them.",
        ("instruction", "not that of the stored chunks",
         "the model, instruction, lead-in and namespace of their index, or index again",
         "the chunks are reused"),
    ),
    Rule(
        "white_space_differs", TIME, _similar("white space"),
        "The prompt holds registered chunks with other white space: only runs of tokens are found.",
        ("white space of the prompt's template", "{in_prompt}", "{registered}, as registered",
         "{chunks_in_other_form} more chunks are found and reused whole"),
    ),
    Rule(
        "text_differs", TIME, _similar("text"),
        "The prompt holds texts that are nearly, but not word for word, registered chunks.",
        ("text that is registered (splitter, cleaning)", "{registered}", "{in_prompt}, as prompted",
         "{chunks_in_other_form} more chunks are found and reused whole"),
    ),
    Rule(
        "not_stored", TIME, _missed(*NOT_STORED),
        "The KV of registered chunks in this prompt is not stored, so it is computed.",
        ("fill_on_miss", "off, or not done yet",
         "on, or run `precompute` (`index --repair`); more host_bytes or disk_bytes if chunks were "
         "evicted",
         "the chunks are reused"),
        is_fault=_misses_much,
    ),
    Rule(
        "no_known_chunk", TIME, _no_known_chunk,
        "The prompt holds no registered chunk.",
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
        "machine_busy", TIME, _machine_busy,
        "Other processes take the CPUs, so times say little; checks of times are left out.",
        ("CPUs of this process", "shared: others use {other_cpu_share:.0%}",
         "CPUs of its own (a quieter machine, a cpuset)",
         "prefill, and blending with it, no longer wait for a CPU"),
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
        "prefill_sooner", TIME, _prefill_sooner,
        "By the speeds measured here, ordinary prefill is sooner than blending.",
        ("tiers", "slower than computing",
         "a faster tier for these chunks (host, device), or a lower recompute_ratio",
         "blending becomes sooner, and the cost model chooses it again"),
    ),
    Rule(
        "not_reused", TIME, _not_reused,
        "Chunks of this prompt are not reused: {reasons}.",
        ("what the reason says", "{reasons}", "its row under Reasons in docs/troubleshooting.md",
         "the chunks are reused"),
        is_fault=lambda facts: not facts.is_blended,
    ),
)  # fmt: skip
"""The most serious first."""
