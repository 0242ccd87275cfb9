"""Wishes and jobs that travel: they come back as they were sent, nothing malformed gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.protocol.job import (
    PARAMETER,
    Ask,
    Compare,
    Job,
    Precompute,
    Span,
    StoreJob,
    Wish,
    read_job,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.conversation_kv import TurnDocument
from cacheblend_rag.prefill.lead_in import LeadInId

HASH, SECRET = "0123456789abcdef" * 2, "fedcba9876543210" * 2
CONFIG = BlendConfig(check_layers=(1, 2), recompute_ratio=(0.5, 0.3))
WISH = Wish(config=CONFIG.to_dict(), report_id=HASH, conversation=SECRET, until=7)
TOKENS = tuple(range(100, 120))
LEAD_IN = LeadInId("document", chunk_id(TOKENS[:3]), 64)
SPANS = (Span(3, 8), Span(9, 15))


def precompute(**changes: Any) -> Precompute:
    """A job over 20 tokens: 3 of lead-in, two chunks of a document behind them."""
    own = {"lead_in": LEAD_IN, "tokens": TOKENS, "chunks": SPANS, "context_start": 3}
    return Precompute(**{**own, **changes})


COMPARE = Compare(tokens=TOKENS, answer=(1, 2), reference=(3,), config=CONFIG, until=7)
EVICT = StoreJob(kind="evict", lead_in=LEAD_IN, keys=((HASH, ""), (HASH, HASH)))


# Wishes


def test_a_wish_survives_json_and_a_request_without_one_has_none() -> None:
    told = Wish.from_params(json.loads(json.dumps(WISH.to_params())))
    assert told is not None
    assert BlendConfig().with_changes(**told.config) == CONFIG
    assert told.to_params() == WISH.to_params()
    assert Wish.from_params(None) is None
    assert Wish.from_params({"do_remote_prefill": True}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 4}, "version: Input should be 5"),
        ({"kind": "blend"}, "kind: Input should be 'find', 'off' or 'idle'"),
        ({"config": "all"}, "config"),
        ({"report_id": "../../etc"}, "report_id"),
        ({"conversation": HASH[:-1]}, "conversation"),
        ({"until": -1}, "until"),
        ({"chunks": [{"start": 0, "end": 5}]}, "chunks: Extra inputs"),
    ],
)
def test_a_malformed_wish_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    params = WISH.to_params()
    params[PARAMETER] |= change
    with pytest.raises(ConfigError, match=f"^{PARAMETER}.{said}"):
        Wish.from_params(params)


# Jobs


@pytest.mark.parametrize(
    "job",
    [
        precompute(),
        precompute(idle=True, conversation=SECRET),
        COMPARE,
        EVICT,
        StoreJob(kind="prefetch", lead_in=LEAD_IN, keys=((HASH, HASH),), conversation=SECRET),
        Ask(kind="status"),
        Ask(kind="report", report_id=HASH),
    ],
)
def test_a_job_survives_json(job: Job) -> None:
    assert read_job(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("job", "change", "said"),
    [
        (EVICT, {"kind": "steal"}, "^Input tag 'steal'"),
        (EVICT, {"lead_in": {"name": "document", "tokens": "xyz", "window": 1}}, "lead_in.tokens"),
        (EVICT, {"keys": [["short", ""]]}, "keys.0.0"),
        (EVICT, {"keys": [[HASH, ""]] * 5000}, "at most 4096 items"),
        (EVICT, {"conversation": "of all"}, "conversation"),
        (EVICT, {"namespace": "another"}, "namespace: Extra inputs"),
        (Ask(kind="report", report_id=HASH), {"report_id": ""}, "report_id"),
        (COMPARE, {"answer": []}, "answer"),
        (COMPARE, {"answer": [-1]}, "answer.0"),
        (COMPARE, {"config": {"recompute_ratio": 7}}, "recompute_ratio"),
        (precompute(), {"chunks": [[-1, 5]]}, "chunks.0.0"),
        (precompute(), {"chunks": [[3, 21]]}, "does not fit 20 tokens"),
        (precompute(), {"chunks": [[2, 5]]}, "does not fit 20 tokens"),
        (precompute(), {"chunks": [[3, 9], [8, 12]]}, "not overlap"),
        (precompute(), {"chunks": [[9, 12], [3, 5]]}, "in order"),
        (precompute(), {"lead_in": {"name": "bos", "tokens": HASH, "window": 0}}, "differs from"),
        (precompute(lead_in=LeadInId("document", LEAD_IN.tokens, 5)), {}, "longer than 5 tokens"),
    ],
)
def test_a_malformed_job_is_refused_by_name(job: Job, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_job(json.dumps({**job.model_dump(mode="json"), **change}))
    assert "\n" not in str(caught.value)


# The names of what is stored


def test_kv_is_stored_under_names_made_of_its_tokens() -> None:
    """Another text before or in a chunk makes other names; that behind it, none."""
    names = precompute().names()
    assert names[0] == (chunk_id(TOKENS[3:8]), "")
    assert names[1][1]
    for position in range(3, 15):
        other = (*TOKENS[:position], 7, *TOKENS[position + 1 :])
        told = precompute(tokens=other).names()
        assert told[1] != names[1]
        assert (told[0] == names[0]) == (position >= 8)
    assert precompute(tokens=(*TOKENS[:15], 7)).names() == names


def test_chunks_behind_the_lead_in_alone_have_no_context() -> None:
    lead_in = LeadInId("bos", LEAD_IN.tokens, 0)
    assert [context for _, context in precompute(lead_in=lead_in).names()] == ["", ""]


def test_turns_are_named_by_their_conversations_secret_and_all_before_them() -> None:
    turns = TurnDocument("a" * 64, TOKENS[:3], 1, ((TOKENS[3:9],), (TOKENS[9:15], TOKENS[15:])))
    own, plain = (
        precompute(chunks=((3, 9), (9, 15), (15, 20)), conversation=secret).names()
        for secret in (SECRET, "")
    )
    known = [(plan.key.chunk_id, plan.key.context_id) for plan in turns.plans(SECRET)]
    assert own == known, "the client that knows the secret knows the names"
    other = [plan.key.context_id for plan in turns.plans(HASH)]
    assert not {context for _, context in own} & {*other, *(context for _, context in plain)}
    changed = precompute(tokens=(7, *TOKENS[1:]), conversation=SECRET, chunks=((3, 9),)).names()
    assert changed[0][0] == own[0][0]
    assert changed[0][1] != own[0][1]
