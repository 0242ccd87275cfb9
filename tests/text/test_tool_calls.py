"""Calls of tools are found in every form that models write them in, and nothing else is."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.text.tool_calls import ContentStream, find_calls

KNOWN = {"look", "get.weather"}
ROME = '{"name": "look", "arguments": {"city": "Rome"}}'
OSLO = '{"name": "get.weather", "parameters": {"city": "Oslo", "days": 3}}'
FOUND = [("look", {"city": "Rome"}), ("get.weather", {"city": "Oslo", "days": 3})]
HERMES = f"<tool_call>\n{ROME}\n</tool_call>"
CALLS = {
    f"{HERMES}\n<tool_call>{OSLO}</tool_call>": ("", FOUND),
    f"Let me see.\n{HERMES}": ("Let me see.", FOUND[:1]),
    f"So:\n{HERMES}\nand that is all": ("So:\nand that is all", FOUND[:1]),
    f"<tool_call>{ROME}": ("", FOUND[:1]),
    "<tool_call>{\"name\": \"unknown\"}</tool_call>": ("", [("unknown", {})]),
    f"[TOOL_CALLS][{ROME}, {OSLO}]": ("", FOUND),
    '[TOOL_CALLS]look{"city": "Rome"}': ("", FOUND[:1]),
    '[TOOL_CALLS]look[ARGS]{"city": "Rome"}': ("", FOUND[:1]),
    f"<|python_tag|>{ROME}; {OSLO}": ("", FOUND),
    f"\n{ROME}\n{OSLO}": ("", FOUND),
    f"[{ROME}, {OSLO}]": ("", FOUND),
    f"Here:\n```json\n{ROME}\n```": ("Here:", FOUND[:1]),
    '{"name": "look", "arguments": "{\\"city\\": \\"Rome\\"}"}': ("", FOUND[:1]),
    'look{"city": "Rome"}': ("", FOUND[:1]),
    '{"n\\u0061me": "l\\u006Fok", "\\u0061rguments": {"city": "Rome"}}': ("", FOUND[:1]),
    '{"\\u0069d": 1, "name": "\\u006cook", "arguments": {"city": "Rome"}}': ("", FOUND[:1]),
    '{"type": "function", "name": "look", "arguments": {"city": "Rome"}}': ("", FOUND[:1]),
}  # fmt: skip
NO_CALLS = [
    "", "Rome is warm.", "{", "[]", "[1, 2]", "{}", "null", '{"name": "Bob", "arguments": {}}',
    '{"name": "look"}', '{"name": ["look"], "arguments": {}}', '{"name": "look", "arguments": 3}',
    '{"name": "look", "arguments": {"a": NaN}}', "<tool_call></tool_call>", "<tool_call>",
    "<tool_call>{broken}</tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS][{}, 7]", "<|python_tag|>ls()",
    '<tool_call>{"name": "a b"}</tool_call>', "```json\n{}\n```", f"Say {ROME}",
    '{"name": "look", "arguments": {"n": ' + "9" * 5000 + "}}",
    '{"kind": 1, "name": "look", "arguments": {}}', 'look at {"city": "Rome"}', "looking{}",
]  # fmt: skip


@pytest.mark.parametrize("text", CALLS)
def test_calls_are_found_in_every_form(text: str) -> None:
    content, calls = find_calls(text, KNOWN)
    assert (content, [(one.name, json.loads(one.arguments)) for one in calls]) == CALLS[text]
    assert len({one.id for one in calls}) == len(calls)
    assert all(one.id.isalnum() and len(one.id) == 9 for one in calls)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert find_calls(text, KNOWN) == (text, ())


def test_half_a_surrogate_pair_can_be_sent() -> None:
    text = '<tool_call>{"name": "look", "arguments": {"city": "\\ud800é"}}</tool_call>'
    [call] = find_calls(text, KNOWN)[1]
    assert json.loads(call.arguments.encode()) == {"city": "\ud800é"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 100_000,
        "<tool_call>{" * 100_000,
        '<tool_call>{"a": "' * 60_000,
        "<tool_call></tool_call>" * 60_000,
        "```json" * 150_000,
        "[TOOL_CALLS]" + "a" * 1_000_000,
        "[TOOL_CALLS]look" + " " * 1_000_000,
        "[" * 1_000_000,
        '{"a":' * 200_000,
        " " * 1_000_000 + "{",
        f"{ROME}; " * 20_000,
    ],
    ids=range(11),
)
def test_hostile_answers_take_linear_time(text: str) -> None:
    """A million characters take a moment; what is quadratic would take minutes."""
    began = time.process_time()
    content, calls = find_calls(text, KNOWN)
    assert calls or content == text
    stream = ContentStream(KNOWN)
    for at in range(0, len(text), 10_000):
        stream.feed(text[at : at + 10_000])
    assert time.process_time() - began < 20


parts = st.sampled_from(
    [*CALLS, *NO_CALLS[:18], "<tool", "_call>", "```", "json", "\n", " ", "word ", "</tool_call>"]
)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(parts | st.text(max_size=8), max_size=6), size=st.integers(1, 9))
def test_a_stream_shows_the_content_and_nothing_else(texts: list[str], size: int) -> None:
    text = "".join(texts)
    content, calls = find_calls(text, KNOWN)
    stream = ContentStream(KNOWN)
    shown = "".join(stream.feed(text[at : at + size]) for at in range(0, len(text), size))
    assert content.startswith(shown)
    assert shown + stream.finish(content) == content
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (['{"', "na", 'me": "Bo', 'b", "age": 3}'], ["", "", '{"name": "Bo', 'b", "age": 3}']),
        (['{"', "kind", '": 1}'], ["", '{"kind', '": 1}']),
        (["[", "\n", "1, 2]"], ["", "", "[\n1, 2]"]),
        (["[", '{"b', '": 1}]'], ["", '[{"b', '": 1}]']),
        (["[", "]", " is empty"], ["", "[]", " is empty"]),
        (["{", "}", "."], ["", "{}", "."]),
        (["[", "see", " below]"], ["", "[see", " below]"]),
        (["lo", "ok", " at it"], ["", "", "look at it"]),
        (["```json\n", '{"b', '": 1}\n```'], ["", '```json\n{"b', '": 1}']),
        (['{"name": "lo', 'ok", ', '"arguments": {}}'], ["", "", ""]),
        (["[", '{"parameters": ', "{}"], ["", "", ""]),
    ],
    ids=str,
)
def test_json_is_held_back_only_while_it_may_be_a_call(pieces: list[str], shown: list[str]) -> None:
    stream = ContentStream(KNOWN)
    assert [stream.feed(piece) for piece in pieces] == shown


def test_in_an_answer_that_is_json_only_plain_json_is_a_call() -> None:
    text = '{"say": "<tool_call> [TOOL_CALLS]look{} ```json"}'
    assert find_calls(text, KNOWN)[1]
    assert find_calls(text, KNOWN, is_json=True) == (text, ())
    assert ContentStream(KNOWN, is_json=True).feed(text) == text
    assert [one.name for one in find_calls(ROME, KNOWN, is_json=True)[1]] == ["look"]
