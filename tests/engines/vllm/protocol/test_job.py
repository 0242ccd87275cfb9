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
    sent_report_id,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.lead_in import LeadInId

HASH = "0123456789abcdef" * 2
PROMPT, OTHER_PROMPT = (1, 2, 3), (1, 2, 4)
LEAD_IN = LeadInId("document", HASH, 2048)
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
        BlendJob("precompute", LEAD_IN, (SentChunk(3, 9, HASH, turn=True),), tokens=TEN, idle=True),
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
        BlendJob("blend", LeadInId("bos", HASH, 0), BLEND.chunks, config=BLEND.config),
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
        "lead_in": LeadInId("document", chunk_id(TOKENS[:3]), 64),
        "chunks": (first, second),
        "tokens": TOKENS,
    }
    return BlendJob("precompute", **{**whole, **changes})


TOKENS = tuple(range(100, 120))
MODEL = {"longest": 20, "vocabulary": 120}
HONEST = precompute()
OF_TURN = replace(HONEST.chunks[1], turn=True, context_id=HASH)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lead_in": LeadInId("document", HASH, 64)}, "differs from the first tokens"),
        ({"lead_in": LeadInId("bos", HONEST.lead_in.tokens, 0)}, "is not that of its tokens"),
        ({"lead_in": LeadInId("document", HONEST.lead_in.tokens, 5)}, "longer than 5 tokens"),
        ({"chunks": (replace(HONEST.chunks[0], context_id=HASH),)}, "is not that of its tokens"),
        ({"chunks": (replace(HONEST.chunks[1], context_id=""),)}, "is not that of its tokens"),
        ({"chunks": (replace(HONEST.chunks[1], context_id=HASH),)}, "is not that of its tokens"),
        (
            {"chunks": (HONEST.chunks[0], replace(HONEST.chunks[1], context_start=4))},
            "the same context_start",
        ),
        ({"chunks": (replace(HONEST.chunks[0], before=(99,)),)}, "must be complete"),
        ({"chunks": (replace(HONEST.chunks[0], after=(99,)),)}, "must be complete"),
        ({"chunks": (HONEST.chunks[0], replace(HONEST.chunks[1], turn=True))}, "of turns, or none"),
        ({"chunks": (replace(OF_TURN, before=(99,)),)}, "must be complete"),
        ({"chunks": (OF_TURN,), "tokens": (*TOKENS[:-1], 120)}, "exceed the model.s context"),
        ({"tokens": (*TOKENS, 100)}, "exceed the model.s context or vocabulary"),
        ({"tokens": (*TOKENS[:-1], 120)}, "exceed the model.s context or vocabulary"),
    ],
)
def test_kv_is_not_stored_under_anothers_key(changes: dict[str, Any], said: str) -> None:
    HONEST.check(**MODEL)
    with pytest.raises(ConfigError, match=said):
        precompute(**changes).check(**MODEL)


def test_what_was_before_a_turn_is_its_conversations_secret() -> None:
    job = precompute(chunks=(OF_TURN,))
    job.check(**MODEL)
    assert job.is_of_turns
    assert not HONEST.is_of_turns


def test_the_same_names_over_another_text_are_refused() -> None:
    for position in range(9):  # of the lead-in, of the first chunk, and of what parts the chunks
        other = [*TOKENS[:position], 7, *TOKENS[position + 1 :]]
        with pytest.raises(
            ConfigError, match=r"differs from the first tokens|is not that of its tokens"
        ):
            precompute(tokens=tuple(other)).check(**MODEL)


def test_chunks_behind_the_lead_in_alone_have_no_context() -> None:
    lead_in = LeadInId("bos", chunk_id(TOKENS[:3]), 0)
    precompute(lead_in=lead_in, chunks=(SentChunk(9, 15, "", False, 3),)).check(**MODEL)
