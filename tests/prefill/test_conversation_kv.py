"""Which segments of a conversation are kept and found, without a model."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from cacheblend_rag import ConfigError, ConversationKV
from cacheblend_rag.kv.chunk_kv import fingerprint, namespace_id
from cacheblend_rag.prefill.conversation_kv import (
    LEAST_TOKENS,
    AnsweredPrompt,
    TurnSegment,
    turn_fingerprint,
)

OF_CHUNKS = fingerprint({"model": "m"}, "tenant")
FIRST, SECOND = tuple(range(100, 120)), tuple(range(200, 230))


def answered(token_ids: tuple[int, ...], *, taken: Any = (), begin: int = 0) -> AnsweredPrompt:
    return AnsweredPrompt(token_ids, begin, list(taken), len(token_ids), OF_CHUNKS, 10)


def keep(kv: ConversationKV, prompt: AnsweredPrompt) -> list[TurnSegment]:
    segments = prompt.segments()
    assert kv.written(kv.begin(segments), kv.keys_of(segments)) == []
    return segments


def test_segments_are_what_lies_between_taken_spans_if_long_enough() -> None:
    short = LEAST_TOKENS - 1
    tokens = tuple(range(100))
    found = answered(tokens, taken=[(10, 20), (20 + short, 60)], begin=1).segments()
    assert [(one.start, len(one.token_ids)) for one in found] == [(1, 9), (60, 40)]
    assert all(one.token_ids == tokens[one.start : one.start + len(one.token_ids)] for one in found)
    assert [one.nbytes for one in found] == [90, 400]


def test_their_fingerprint_is_of_the_namespace_and_not_that_of_chunks() -> None:
    (segment,) = answered(FIRST).segments()
    assert segment.fingerprint == turn_fingerprint(OF_CHUNKS) != OF_CHUNKS
    assert segment.fingerprint.startswith(namespace_id("tenant"))


def test_keys_depend_on_the_id_and_on_the_tokens_before() -> None:
    here, there = ConversationKV(), ConversationKV()
    (alone,) = answered(FIRST).segments()
    _, behind = answered(SECOND + FIRST, taken=[(29, 30)]).segments()
    behind = replace(behind, token_ids=FIRST)
    keys = {kv.keys_of([one])[0] for kv in (here, there) for one in (alone, behind)}
    assert len({key.context_id for key in keys}) == 4
    assert len({key.chunk_id for key in keys}) == 1


def test_they_are_found_in_gaps_only_and_are_exact_only_after_the_same_tokens() -> None:
    kv = ConversationKV()
    keep(kv, answered(FIRST))
    keep(kv, answered(FIRST + SECOND, taken=[(0, 20)]))
    same = kv.find(FIRST + SECOND + (1, 2), 0, [], 52, OF_CHUNKS)
    assert [(one.start, one.end, one.is_exact) for one in same] == [(0, 20, True), (20, 50, True)]
    moved = kv.find((9, *SECOND, *FIRST), 0, [], 51, OF_CHUNKS)
    assert [(one.start, one.end, one.is_exact) for one in moved] == [
        (1, 31, False),
        (31, 51, False),
    ]
    assert all(one.is_turn for one in moved)
    assert kv.find(FIRST + SECOND, 0, [(0, 20)], 50, OF_CHUNKS) == same[1:]
    assert kv.find(FIRST + SECOND, 0, [], 20, OF_CHUNKS) == same[:1]
    assert kv.find(FIRST + SECOND, 0, [], 50, fingerprint({"model": "n"}, "tenant")) == []


def test_a_text_that_shares_less_than_half_of_a_segment_is_not_taken_for_it() -> None:
    kv = ConversationKV()
    keep(kv, answered(SECOND))
    assert kv.find((*SECOND[:14], 1, 2, 3), 0, [], 17, OF_CHUNKS) == []
    (part,) = kv.find((*SECOND[:15], 1, 2, 3), 0, [], 18, OF_CHUNKS)
    assert (part.end - part.start, part.before, part.after) == (15, (), SECOND[15:])


def test_what_was_not_stored_is_not_kept() -> None:
    kv = ConversationKV()
    segments = answered(FIRST + SECOND, taken=[(20, 21)]).segments()
    turn = kv.begin(segments)
    kv.written(turn, kv.keys_of(segments[:1]))
    assert kv.keys() == kv.keys_of(segments[:1])
    assert kv.written(kv.begin(segments[1:]), ()) == []
    assert kv.turns == 1


def test_a_turn_that_was_forgotten_while_it_was_written_is_evicted() -> None:
    kv = ConversationKV()
    segments = answered(FIRST).segments()
    turn = kv.begin(segments)
    assert kv.forget() == kv.keys_of(segments)
    assert kv.written(turn, kv.keys_of(segments)) == kv.keys_of(segments)
    assert kv.keys() == []


def test_the_first_segments_of_the_oldest_turn_go_first() -> None:
    kv = ConversationKV(most_bytes=700)
    old = keep(kv, answered(FIRST + SECOND, taken=[(20, 21)]))
    new = answered(SECOND).segments()
    assert kv.written(kv.begin(new), kv.keys_of(new)) == kv.keys_of(old[:1])
    assert kv.keys() == kv.keys_of([*old[1:], *new])
    assert kv.nbytes == 590


def test_kv_that_two_turns_have_in_common_is_evicted_with_the_last_of_them() -> None:
    kv = ConversationKV(most_turns=2)
    first = keep(kv, answered(FIRST))
    keep(kv, answered(FIRST))
    other = answered(SECOND).segments()
    assert kv.written(kv.begin(other), kv.keys_of(other)) == []
    assert kv.written(kv.begin(other), kv.keys_of(other)) == kv.keys_of(first)


def test_it_is_the_same_after_saving() -> None:
    kv = ConversationKV(most_turns=7, most_bytes=1 << 20)
    keep(kv, answered(FIRST + SECOND, taken=[(20, 21)]))
    again = ConversationKV.from_plain(kv.to_plain())
    assert again.to_plain() == kv.to_plain()
    assert again.keys() == kv.keys()


SEGMENT: dict[str, Any] = {**asdict(answered(FIRST).segments()[0]), "token_ids": list(FIRST)}


@pytest.mark.parametrize(
    "changed",
    [
        {"conversation_id": None},
        {"conversation_id": "x" * 32},
        {"most_turns": -1},
        {"most_bytes": True},
        {"turns": 1},
        {"turns": [[{}]]},
        {"more": 1},
        *(
            {"turns": [[{**SEGMENT, **wrong}]]}
            for wrong in (
                {"token_ids": []},
                {"token_ids": [-1]},
                {"token_ids": [1 << 32]},
                {"token_ids": "12"},
                {"fingerprint": "../x"},
                {"before": 1},
                {"start": -1},
                {"more": 1},
            )
        ),
    ],
)
def test_malformed_values_are_refused(changed: dict[str, Any]) -> None:
    plain = {**ConversationKV().to_plain(), "turns": [[SEGMENT]]}
    ConversationKV.from_plain(plain)
    with pytest.raises(ConfigError):
        ConversationKV.from_plain({**plain, **changed})
