"""Jobs that travel: they come back as they were sent, and nothing malformed gets through."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.protocol.job import (
    PARAMETER,
    SALT_PREFIX,
    BlendJob,
    SentChunk,
    SentLeadIn,
    SentSegment,
    sent_report_id,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id

HASH = "0123456789abcdef" * 2
PROMPT, OTHER_PROMPT = (1, 2, 3), (1, 2, 4)
LEAD_IN = SentLeadIn("document", HASH, 2048)
TEN, TWENTY = tuple(range(10)), tuple(range(20))
BLEND = BlendJob(
    "blend",
    LEAD_IN,
    (SentChunk(3, 10), SentChunk(12, 20, HASH, True, before=(7,), after=(8, 9))),
    config=BlendConfig(recompute_ratio=0.3, check_layers=(1, 2), recompute_ratios=(0.5, 0.3)),
)


def sent(job: BlendJob) -> dict[str, Any]:
    """What arrives when a job has gone through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(job.to_params()))
    return plain


@pytest.mark.parametrize(
    "job",
    [
        BLEND,
        BlendJob(
            "precompute", LEAD_IN, (SentChunk(3, 10, HASH, False, 2),), tokens=tuple(range(10))
        ),
        BlendJob("precompute", LEAD_IN, (SentChunk(3, 9),), tokens=TEN, idle=True),
        BlendJob("evict", LEAD_IN, keys=((HASH, ""), (HASH, HASH))),
        BlendJob("prefetch", LEAD_IN, keys=((HASH, ""),)),
        BlendJob("evict", LEAD_IN, keys=((HASH, HASH),), turns=True),
        BlendJob(
            "keep",
            LEAD_IN,
            (SentChunk(0, 6), SentChunk(6, 9, HASH, turn=True, exact=True)),
            tokens=TWENTY,
            idle=True,
            kept=(SentSegment(2, 10, HASH), SentSegment(12, 20, HASH)),
        ),
        BlendJob("keep", LEAD_IN, tokens=TWENTY, idle=True, kept=(SentSegment(0, 20, HASH),)),
        BlendJob("status", LEAD_IN),
        BlendJob("report", LEAD_IN, report_id=HASH),
        replace(BLEND, report_id=HASH),
    ],
)
def test_a_job_survives_json(job: BlendJob) -> None:
    assert BlendJob.from_params(sent(job), 100) == job


def test_only_what_is_stored_can_wait_for_idle_time() -> None:
    assert BlendJob.from_params(sent(replace(BLEND, idle=True)), 100) == BLEND


def test_a_request_without_a_job_has_none() -> None:
    assert BlendJob.from_params(None, 10) is None
    assert BlendJob.from_params({"do_remote_prefill": True}, 10) is None


def test_a_chunk_is_named_by_all_of_its_tokens() -> None:
    chunk = SentChunk(2, 4, before=(8,), after=(9, 7))
    assert chunk.own_tokens(TEN) == (8, 2, 3, 9, 7)
    assert SentChunk(2, 4).own_tokens(TEN) == (2, 3)


def test_equal_work_has_one_salt_and_any_change_another() -> None:
    assert BLEND.salt(PROMPT) == BlendJob("blend", LEAD_IN, BLEND.chunks, config=BLEND.config).salt(
        PROMPT
    )
    assert BLEND.salt(PROMPT) == replace(BLEND, report_id=HASH).salt(PROMPT)
    others = [
        BlendJob(
            "blend", LEAD_IN, BLEND.chunks, config=BLEND.config.with_changes(selector="prior")
        ),
        BlendJob("blend", LEAD_IN, BLEND.chunks[:1], config=BLEND.config),
        replace(BLEND, chunks=(BLEND.chunks[0], replace(BLEND.chunks[1], before=(6,)))),
        BlendJob("blend", SentLeadIn("bos", HASH, 0), BLEND.chunks, config=BLEND.config),
        *(
            replace(BLEND, chunks=(BLEND.chunks[0], replace(BLEND.chunks[1], **change)))
            for change in ({"turn": True}, {"turn": True, "exact": True}, {"context_id": "f" * 32})
        ),
    ]
    assert len({BLEND.salt(PROMPT), *(other.salt(PROMPT) for other in others)}) == 8
    assert BLEND.salt(PROMPT).startswith(SALT_PREFIX)


def test_another_question_is_other_work_where_it_decides_about_rows() -> None:
    chosen = replace(BLEND, config=BLEND.config.with_changes(selector="hkvd"))
    assert chosen.salt(PROMPT) == chosen.salt(OTHER_PROMPT)
    asking = replace(BLEND, config=BLEND.config.with_changes(selector="question_mid"))
    assert asking.salt(PROMPT) != asking.salt(OTHER_PROMPT)


def chunk(start: int = 0, end: int = 5, **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, **more}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 9}, "version"),
        ({"kind": "steal"}, "kind: Input should be 'blend'"),
        ({"lead_in": {"name": "document", "tokens": "xyz", "window": 1}}, "lead_in.tokens"),
        ({"lead_in": {"name": "my own", "tokens": "", "window": 1}}, "lead_in.name"),
        ({"chunks": []}, "chunks must not be empty"),
        ({"chunks": "all"}, "chunks"),
        ({"chunks": [chunk(0, 101)]}, "does not fit 100 tokens"),
        ({"chunks": [chunk(-1)]}, "does not fit"),
        ({"chunks": [chunk(context_id="../../etc")]}, "chunks.0.context_id"),
        ({"chunks": [chunk(context_start=3)]}, "does not fit"),
        ({"chunks": [chunk(0, 9), chunk(8, 12)]}, "overlap"),
        ({"chunks": [{"start": 0}]}, "chunks.0.end: Field required"),
        ({"chunks": [chunk(before=[-1])]}, "chunks.0.before.0"),
        ({"chunks": [chunk(after=[1 << 31])]}, "chunks.0.after.0"),
        ({"chunks": [chunk(turn=True)]}, "turn's context_id"),
        ({"chunks": [chunk(context_id=HASH, exact=True)]}, "only a turn's KV may be exact"),
        ({"chunks": [chunk(lead_in={"name": "bos", "tokens": "", "window": 0})]}, "its job's"),
        ({"tokens": [1]}, "tokens is nothing for kind='blend'"),
        ({"kind": "evict", "chunks": [], "turns": "of all"}, "turns"),
        ({"keys": [["short", ""]]}, "keys"),
        ({"config": {"recompute_ratio": 7}}, "recompute_ratio"),
        ({"config": {"unknown": 1}}, "unknown"),
        ({"report_id": "../../etc"}, "report_id"),
        ({"report_id": f"{HASH}\n"}, "report_id"),
        ({"kind": "report"}, "report_id"),
        ({"kind": "evict", "keys": [[HASH, ""]] * 5000}, "at most 4096 items"),
    ],
)
def test_what_is_malformed_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    params = sent(BLEND)
    params[PARAMETER].update(change)
    with pytest.raises(ConfigError, match=said):
        BlendJob.from_params(params, 100)


def segment(start: int, end: int, context_id: str = HASH) -> dict[str, Any]:
    return {"start": start, "end": end, "context_id": context_id}


KEEP = BlendJob("keep", LEAD_IN, tokens=TWENTY, idle=True, kept=(SentSegment(0, 8, HASH),))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kept": []}, "kept must not be empty"),
        ({"kept": [{"start": 0, "end": 8}]}, "kept.0.context_id: Field required"),
        ({"kept": [segment(0, 7)]}, "each of at least 8 of the 20 tokens"),
        ({"kept": [segment(-1, 8)]}, "kept.0.start"),
        ({"kept": [segment(12, 21)]}, "in order"),
        ({"kept": [segment(1 << 70, 1 << 71)]}, "in order"),
        ({"kept": [segment(0, 9), segment(8, 17)]}, "not overlap"),
        ({"kept": [segment(9, 17), segment(0, 8)]}, "in order"),
        ({"kept": [segment(0, 8, "secret")]}, "context_id"),
        ({"kept": [segment(0, 8)] * 4097}, "at most 4096 items"),
        ({"tokens": []}, "tokens"),
        ({"tokens": list(range(7))}, "of the 7 tokens"),
        ({"chunks": [chunk(0, 20)]}, "does not fit"),
        ({"chunks": "all"}, "chunks"),
    ],
)
def test_what_is_kept_is_checked(change: dict[str, Any], said: str) -> None:
    params = sent(KEEP)
    assert BlendJob.from_params(params, 2) == KEEP
    params[PARAMETER].update(change)
    with pytest.raises(ConfigError, match=said):
        BlendJob.from_params(params, 2)


def test_it_is_always_for_idle_time_and_within_the_model() -> None:
    assert BlendJob.from_params(sent(replace(KEEP, idle=False)), 2) == KEEP
    KEEP.check(longest=20, vocabulary=20)
    for longest, vocabulary in [(19, 20), (20, 19)]:
        with pytest.raises(ConfigError, match="exceed"):
            KEEP.check(longest=longest, vocabulary=vocabulary)


def test_a_malformed_job_still_says_where_its_report_goes() -> None:
    params = sent(replace(BLEND, report_id=HASH))
    params[PARAMETER]["chunks"] = "all"
    assert sent_report_id(params) == HASH
    for useless in (None, {}, {PARAMETER: 3}, {PARAMETER: {"report_id": ["x"]}}, sent(BLEND)):
        assert sent_report_id(useless) == ""


# What is stored is what its key says


def precompute(**changes: Any) -> BlendJob:
    """A job over 20 tokens: 3 of lead-in, two chunks of a document behind them."""
    first = SentChunk(3, 8, "", False, 3)
    second = SentChunk(9, 15, chunk_id(TOKENS[3:9]), False, 3)
    whole: dict[str, Any] = {
        "lead_in": SentLeadIn("document", chunk_id(TOKENS[:3]), 64),
        "chunks": (first, second),
        "tokens": TOKENS,
    }
    return BlendJob("precompute", **{**whole, **changes})


TOKENS = tuple(range(100, 120))
MODEL = {"longest": 20, "vocabulary": 120}
HONEST = precompute()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lead_in": SentLeadIn("document", HASH, 64)}, "differs from the first tokens"),
        ({"lead_in": SentLeadIn("bos", HONEST.lead_in.tokens, 0)}, "is not that of its tokens"),
        ({"lead_in": SentLeadIn("document", HONEST.lead_in.tokens, 5)}, "longer than 5 tokens"),
        ({"chunks": (replace(HONEST.chunks[0], context_id=HASH),)}, "is not that of its tokens"),
        ({"chunks": (replace(HONEST.chunks[1], context_id=""),)}, "is not that of its tokens"),
        ({"chunks": (replace(HONEST.chunks[1], context_id=HASH),)}, "is not that of its tokens"),
        (
            {"chunks": (HONEST.chunks[0], replace(HONEST.chunks[1], context_start=4))},
            "the same context_start",
        ),
        ({"chunks": (replace(HONEST.chunks[0], before=(99,)),)}, "must be complete"),
        ({"chunks": (replace(HONEST.chunks[0], after=(99,)),)}, "must be complete"),
        ({"chunks": (replace(HONEST.chunks[1], turn=True),)}, "kept, not precomputed"),
        ({"tokens": (*TOKENS, 100)}, "exceed the model.s context or vocabulary"),
        ({"tokens": (*TOKENS[:-1], 120)}, "exceed the model.s context or vocabulary"),
    ],
)
def test_kv_is_not_stored_under_anothers_key(changes: dict[str, Any], said: str) -> None:
    HONEST.check(**MODEL)
    with pytest.raises(ConfigError, match=said):
        precompute(**changes).check(**MODEL)


def test_the_same_names_over_another_text_are_refused() -> None:
    for position in range(9):  # of the lead-in, of the first chunk, and of what parts the chunks
        other = [*TOKENS[:position], 7, *TOKENS[position + 1 :]]
        with pytest.raises(
            ConfigError, match=r"differs from the first tokens|is not that of its tokens"
        ):
            precompute(tokens=tuple(other)).check(**MODEL)


def test_chunks_behind_the_lead_in_alone_have_no_context() -> None:
    lead_in = SentLeadIn("bos", chunk_id(TOKENS[:3]), 0)
    precompute(lead_in=lead_in, chunks=(SentChunk(9, 15, "", False, 3),)).check(**MODEL)
