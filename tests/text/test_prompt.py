"""Prompts cut into segments, tokenized as one text, and chat templates of several kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.errors import PromptError
from cacheblend_rag.text.chat import render_chat
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import Segment
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.registry import ChunkRegistry
from tests.tokenizer_kinds import CHATML, CORPUS, tokenizer_of

WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
JSON_TOOLS = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'tool' %}{{ {'result': m.content} | tojson }}{% else %}{{ m.content }}"
    "{% endif %}\n{% endfor %}"
)
STRIPPING = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"
TEMPLATES = [CHATML, WITH_BOS, JSON_TOOLS, STRIPPING]
MARKED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ALTERNATES = (
    "{% for m in messages %}{% if m.role == 'system' or "
    "(m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('no') }}{% endfor %}"
)
DROPS = "{% set messages = messages | rejectattr('role', 'equalto', 'system') %}"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    [*CORPUS, "{chunk}", "{{ m }}", "\ue000\ue001", "\x00\x1f", "\r\n", '"', "\\n", "{% raw %}"]
)
chunks = texts.filter(lambda t: bool(t.strip())).map(Chunk)


def with_template(template: str | None, *, opens: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer_of("byte-level", opens=opens))
    tokenizer.chat_template = template
    return tokenizer


def plain_rendering(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> str:
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    return rendered


@given(st.lists(chunks, max_size=4), texts, st.data())
def test_segments_joined_are_the_text(known: list[Chunk], text: str, data: st.DataObject) -> None:
    registry = ChunkRegistry(known)
    pieces = data.draw(st.permutations([text, *(c.text for c in known), text]))
    whole = "".join(pieces)
    segments = BlendPrompt.from_text(whole, registry).segments
    assert "".join(s.text for s in segments) == whole
    assert all(s.text for s in segments)
    assert all(s.chunk is None or s.chunk.text == s.text in registry for s in segments)


def test_a_segment_must_hold_its_chunk() -> None:
    with pytest.raises(PromptError, match="differs from its chunk's text"):
        BlendPrompt((Segment("altered", Chunk("original")),))


roles = st.sampled_from(["system", "user", "assistant", "tool"])
conversations = st.lists(
    st.tuples(roles, st.lists(texts | st.sampled_from(CORPUS), max_size=4).map("".join)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(turns=conversations)
def test_the_text_is_the_plain_rendering(template: str, turns: list[tuple[str, str]]) -> None:
    tokenizer = with_template(template, opens=True)
    messages = [{"role": role, "content": content} for role, content in turns]
    registry = ChunkRegistry(Chunk(text) for text in CORPUS)
    prompt = BlendPrompt.from_text(render_chat(messages, tokenizer), registry)
    if template in (CHATML, WITH_BOS) or "tool" not in {role for role, _ in turns}:
        assert prompt.text == plain_rendering(tokenizer, messages)
    token_ids = prompt.encode(tokenizer).token_ids
    assert token_ids.count(tokenizer.bos_token_id) == (template == WITH_BOS)


def test_text_parts_are_joined_and_other_fields_kept() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{{ m.name }}{% endfor %}"
    tokenizer = with_template(template)
    parts = [{"type": "text", "text": "one"}, "two"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ]
    assert render_chat(messages, tokenizer).text == "one\ntwoannNone[1]"


@pytest.mark.parametrize("template", [REFUSING, "{{ messages[0].content + 1 }}", "{% if %}"])
def test_a_failing_template_is_explained(template: str) -> None:
    with pytest.raises(PromptError, match="the chat template refused the messages"):
        render_chat([{"role": "user", "content": "hello"}], with_template(template))


USER = {"role": "user"}
LIST = "must be a non-empty list of {'role': ..., 'content': ...}"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], f" {LIST}"),
        (["hello"], "[0] must be a mapping with 'role' and 'content', not 'hello'"),
        ([{"content": "hello"}], "[0].role must be a non-empty string, not None"),
        ([{**USER, "content": 7}], "[0].content must be a string or a list of text parts, not 7"),
        (
            [{**USER, "content": ["a", {"type": "image"}]}],
            "[0].content[1] must be a string or {",
        ),
        ([{**USER, "content": [{"type": "text", "text": 3}]}], "[0].content[0].text must be a str"),
    ],
)
def test_what_is_wrong_with_messages_is_said(messages: Any, said: str) -> None:
    with pytest.raises(PromptError) as refused:
        render_chat(messages, with_template(CHATML))
    assert str(refused.value).startswith(f"messages{said}")


def test_what_is_wrong_with_a_prompt_is_said_whole() -> None:
    with pytest.raises(PromptError) as refused:
        BlendPrompt.of("a", 7)  # type: ignore[arg-type]
    assert str(refused.value) == "part 1 of a prompt must be a str or a Chunk, not 7"
    with pytest.raises(PromptError) as refused:
        ChunkRegistry([Chunk("  ", document_id="d")])
    assert str(refused.value) == (
        "chunk text '  ' of document 'd' is empty or only white space; drop such chunks before "
        "registering"
    )
    with pytest.raises(PromptError) as refused:
        render_chat([{"role": "user", "content": "a"}], with_template(None))
    assert str(refused.value) == (
        "the tokenizer has no chat template: pass the prompt as a plain string or set "
        "tokenizer.chat_template"
    )


@pytest.mark.parametrize(
    ("head", "roles", "wanted"),
    [
        ("", "s u", "<system>A<user>B"),
        (ALTERNATES, "s u", "<user>A\n\nB"),
        (ALTERNATES, "s u a u", "<user>A\n\nB<assistant>C<user>D"),
        (ALTERNATES, "s s u", "<user>A\n\nB\n\nC"),
        (ALTERNATES, "u a s u", "<user>A<assistant>B<user>C\n\nD"),
        (ALTERNATES, "u s", "<user>A\n\nB"),
        (ALTERNATES, "u a s", "<user>A<assistant>B<user>C"),
        (ALTERNATES, "s", "<user>A"),
        (DROPS, "s u a s u", "<user>A\n\nB<assistant>C<user>D\n\nE"),
        (SYSTEM_FIRST, "s s u a s u", "<system>A\n\nB<user>C<assistant>D<user>E\n\nF"),
    ],
)
def test_system_messages_that_a_template_does_not_take_are_the_users(
    head: str, roles: str, wanted: str
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [
        {"role": names[role], "content": chr(ord("A") + place)}
        for place, role in enumerate(roles.split())
    ]
    tokenizer = with_template(head + MARKED)
    assert render_chat(messages, tokenizer).text == wanted
