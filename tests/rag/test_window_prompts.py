"""An analysis' prompts begin as the engine's chunks were computed, with and without a template."""

from __future__ import annotations

import pytest

from cacheblend_rag import Chunk, LeadInConfig
from cacheblend_rag.rag.document_report import INSTRUCTION, WindowPrompts, default_lead_in
from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHUNKS = [Chunk("w2 w3 w4"), Chunk("w5 w6")]


def templated():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_without_a_template_prompts_are_plain_text_that_ends_at_the_next_question():
    prompts = WindowPrompts.of("Who?", make_tokenizer(), "")
    prompt = prompts.window(CHUNKS)
    assert prompt.text == f"{INSTRUCTION}\n\nw2 w3 w4\n\nw5 w6\n\nQuestion: Who?\nAnswer:"
    assert [one.chunk for one in prompt.segments if one.chunk] == CHUNKS
    assert not prompt.is_rendered
    assert prompts.stop == ("\n\nQuestion:",)


@pytest.mark.parametrize("opened", [False, True])
def test_a_template_renders_the_instruction_as_system_message(opened):
    """Whether the engine was opened with that text or without any makes no difference."""
    tokenizer = templated()
    lead_in = default_lead_in(tokenizer)
    prompts = WindowPrompts.of("Who?", tokenizer, lead_in if opened else "")
    prompt = prompts.window(CHUNKS)
    assert prompt.text == (
        f"[system] {INSTRUCTION} [end] [user] w2 w3 w4\n\nw5 w6\n\nQuestion: Who?\nAnswer: [end] "
        "[assistant] "
    )
    assert prompt.text.startswith(lead_in)
    assert prompt.is_rendered
    assert prompts.stop == ()


def test_an_engine_of_plain_prompts_gets_plain_prompts_though_it_has_a_template():
    prompt = WindowPrompts.of("Who?", templated(), "Read:\n\n").window(CHUNKS)
    assert prompt.text == "Read:\n\nw2 w3 w4\n\nw5 w6\n\nQuestion: Who?\nAnswer:"
    assert not prompt.is_rendered


def test_chunks_are_computed_after_the_text_that_prompts_begin_with():
    tokenizer = templated()
    engine = ToyEngine(tokenizer, instruction=default_lead_in, lead_in=LeadInConfig())
    prompts = WindowPrompts.of("Who?", tokenizer, engine.instruction)
    assert prompts.before == engine.instruction == default_lead_in(tokenizer)
    engine.precompute(CHUNKS, progress=False)
    report = engine.generate(prompts.window(CHUNKS)).report
    assert [chunk.document_id for chunk in report.chunks] == [None, None]
    assert not any(chunk.reason == "not stored" for chunk in report.chunks)


def test_an_answer_to_refine_stands_after_the_chunks_and_before_the_question():
    text = WindowPrompts.of("Who?", make_tokenizer(), "").window(CHUNKS, "Nobody {so far}").text
    places = [text.index(part) for part in ("w5 w6", "Nobody {so far}", "Question: Who?")]
    assert places == sorted(places)


def test_answers_are_joined_in_order_under_the_question():
    text = WindowPrompts.of("Who?", make_tokenizer(), "").combining(["Ann", "Bob"]).text
    assert "Part 1: Ann\n\nPart 2: Bob\n\n" in text
    assert text.endswith("\n\nQuestion: Who?\nAnswer:")
