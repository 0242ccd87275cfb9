"""Which turns of a conversation are kept and found, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_rag import ConfigError, ConversationKV
from cacheblend_rag.kv.chunk_kv import KVKey, fingerprint
from cacheblend_rag.prefill.conversation_kv import (
    LEAST_TOKENS,
    TurnDocument,
    turn_fingerprint,
)

OF_CHUNKS = fingerprint({"model": "m"}, "tenant")
OF_TURNS = turn_fingerprint(OF_CHUNKS)
LEAD = (7, 8, 9)
EMPTY = TurnDocument(OF_TURNS, LEAD, token_bytes=10)
FIRST, SECOND, THIRD = (tuple(range(at, at + 20)) for at in (100, 200, 300))


def add(kv: ConversationKV, *runs: tuple[int, ...], most: int = 1000) -> list[KVKey]:
    return kv.add(runs, EMPTY, most)


def test_each_turn_is_computed_after_the_lead_and_the_turns_before_it() -> None:
    kv = ConversationKV()
    add(kv, FIRST, SECOND, THIRD[: LEAST_TOKENS - 1])
    add(kv, THIRD)
    ((first, second, third),) = kv.plans(OF_TURNS)
    assert (first.lead, first.context, first.token_ids) == (LEAD, (), FIRST)
    assert (second.context, second.token_ids) == (FIRST, SECOND)
    assert (third.context, third.token_ids) == (FIRST + SECOND, THIRD)
    assert all(plan.is_turn for plan in (first, second, third))
    assert kv.plans(OF_CHUNKS) == []
    assert (kv.turns, kv.nbytes) == (2, 600)


def test_keys_depend_on_the_id_and_on_the_tokens_before() -> None:
    here, there = ConversationKV(), ConversationKV()
    for kv in (here, there):
        add(kv, FIRST, SECOND, FIRST)
    keys = [*here.keys(), *there.keys()]
    assert len({key.context_id for key in keys}) == 6
    assert len({key.chunk_id for key in keys}) == 2


def test_a_document_ends_where_it_would_be_too_long_or_another_models() -> None:
    kv = ConversationKV()
    add(kv, FIRST, SECOND)
    add(kv, THIRD, most=62)
    assert [[plan.context for plan in one] for one in kv.plans(OF_TURNS)] == [[(), FIRST], [()]]
    other = turn_fingerprint(fingerprint({"model": "n"}, "tenant"))
    kv.add([FIRST], TurnDocument(other, LEAD, 10), 1000)
    assert [len(one) for one in kv.plans(other)] == [1]
    add(kv, FIRST)
    assert [len(one) for one in kv.plans(OF_TURNS)] == [2, 2], "the latest that it may go on with"
    add(kv, FIRST)
    assert [len(one) for one in kv.plans(OF_TURNS)] == [2, 2], "it was answered once more"


def test_the_oldest_go_beyond_the_bounds() -> None:
    kv = ConversationKV(most_bytes=700)
    assert add(kv, FIRST) == []
    old = kv.keys()
    assert add(kv, SECOND) == []
    assert add(kv, THIRD) == []
    assert add(kv, FIRST) == old
    assert kv.nbytes == 600
    few = ConversationKV(most_turns=2)
    for run in (FIRST, SECOND, THIRD):
        add(few, run)
        assert few.known_until(run, [(0, 20)]) == 20
    assert few.turns == 2
    none = ConversationKV(most_turns=0)
    assert len(add(none, FIRST)) == 1
    assert none.keys() == []


def test_it_is_the_same_after_saving() -> None:
    kv = ConversationKV(most_turns=7, most_bytes=1 << 20)
    add(kv, FIRST, SECOND)
    again = ConversationKV.from_plain(kv.to_plain())
    assert again.to_plain() == kv.to_plain()
    assert again.keys() == kv.keys()


DOCUMENT: dict[str, Any] = {
    "fingerprint": OF_TURNS,
    "lead": [1],
    "token_bytes": 10,
    "turns": [[[1, 2, 3]]],
}


@pytest.mark.parametrize(
    "changed",
    [
        {"conversation_id": None},
        {"conversation_id": "x" * 32},
        {"most_turns": -1},
        {"most_bytes": True},
        {"documents": 1},
        {"documents": [{}]},
        {"more": 1},
        *(
            {"documents": [{**DOCUMENT, **wrong}]}
            for wrong in (
                {"turns": [[[]]]},
                {"turns": [[[-1]]]},
                {"turns": [[[1 << 32]]]},
                {"turns": [["12"]]},
                {"lead": ["1"]},
                {"fingerprint": "../x"},
                {"token_bytes": -1},
                {"more": 1},
            )
        ),
    ],
)
def test_malformed_values_are_refused(changed: dict[str, Any]) -> None:
    plain = {**ConversationKV().to_plain(), "documents": [DOCUMENT]}
    ConversationKV.from_plain(plain)
    with pytest.raises(ConfigError):
        ConversationKV.from_plain({**plain, **changed})
