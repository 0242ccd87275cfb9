from __future__ import annotations

from datetime import datetime

import pytest
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import chat_template_utils

from cacheblend_rag import BlendConfig, SamplingParams, TieredKVStore, TransformersEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.registry import ChunkRegistry
from tests.toy import DEFAULT_FRAME, INSTRUCTION, TOY

NOW = Turn.of("What {now}?", ("Passage {a}.", "Passage b."))
BEFORE = Turn.of("What before?", ("Passage c.",), "An answer.")


class Templated:
    """A tokenizer with a chat template, as a function of the messages."""

    chat_template = "yes"

    def __init__(self, template):
        self._template = template

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        return self._template(messages)


class Plain:
    chat_template = None


def marked(messages):
    return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"


def refuses_system(messages):
    if messages[0]["role"] == "system":
        raise TemplateError("System role not supported")
    return marked(messages)


def drops_system(messages):
    return marked([m for m in messages if m["role"] != "system"])


def test_the_demo_model_is_asked_as_it_was_trained():
    prompt = RagPrompt(AutoTokenizer.from_pretrained(TOY), INSTRUCTION)
    assert prompt.lead_in == f"<bos>{DEFAULT_FRAME.head}"
    tail = DEFAULT_FRAME.tail.format(question="Who?")
    assert prompt.render([Turn.of("Who?", ("A.", "B."))]) == f"{prompt.lead_in}A.\n\nB.{tail}"
    assert prompt.stop == ()


@pytest.mark.parametrize(
    ("tokenizer", "is_rendered"), [(Templated(marked), True), (Plain(), False)]
)
def test_known_passages_are_chunks_of_the_prompt(tokenizer, is_rendered):
    registry, known = ChunkRegistry(), Chunk("Passage {a}.")
    registry.add_many([known])
    rag = RagPrompt(tokenizer, "Be brief.")
    prompt = rag.segmented([NOW], registry)
    assert prompt.text == rag.render([NOW])
    assert [part.chunk for part in prompt.segments if part.chunk] == [known]
    assert prompt.is_rendered == is_rendered


@pytest.mark.parametrize(
    ("tokenizer", "lead_in"),
    [
        (Templated(marked), "<system>Be {brief}.</><user>"),
        (Templated(refuses_system), "<user>Be {brief}.\n\n"),
        (Templated(drops_system), "<user>Be {brief}.\n\n"),
        (Plain(), "Be {brief}.\n\n"),
    ],
)
def test_every_prompt_begins_with_the_lead_in_and_holds_the_passages_whole(tokenizer, lead_in):
    prompt = RagPrompt(tokenizer, " Be {brief}.\n")
    assert prompt.lead_in == lead_in
    for turns in ([NOW], [BEFORE, NOW], [BEFORE, BEFORE, NOW]):
        text = prompt.render(turns)
        assert text.startswith(f"{lead_in}{turns[0].sources[0].chunk.text}\n\n")
        assert text.count("Be {brief}.") == 1
        assert "Passage {a}.\n\nPassage b.\n\nQuestion: What {now}?\nAnswer:" in text
        assert text.count("An answer.") == len(turns) - 1


def test_a_model_without_a_template_is_stopped_before_it_asks_itself():
    prompt = RagPrompt(Plain(), "")
    assert prompt.lead_in == ""
    assert prompt.stop == ("\n\nQuestion:",)


def test_a_template_that_shows_no_user_text_is_refused():
    with pytest.raises(ConfigError, match="chat template"):
        RagPrompt(Templated(lambda messages: "fixed"), "Be brief.")


def test_nothing_in_a_turn_is_a_control_token():
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    rag = RagPrompt(tokenizer, "Be brief.")
    evil = "".join(tokenizer.all_special_tokens)

    def controls(text):
        turns = [Turn.of(text, (text,), "Yes."), Turn.of("Who?", (text,))]
        ids = rag.segmented(turns, ChunkRegistry()).encode(tokenizer).token_ids
        return [token for token in ids if token in tokenizer.all_special_ids]

    assert controls(evil) == controls("plain")


DATED = (
    "<bos>Today is {{ strftime_now('%-d %B %Y') }}.\n"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"
)


@pytest.fixture
def today(monkeypatch):
    """Set the day that chat templates tell: ``today(2026, 11, 30)``."""

    def on(*day):
        clock = type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None: cls(*day))})
        monkeypatch.setattr(chat_template_utils, "datetime", clock)

    return on


@pytest.fixture
def dated():
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    tokenizer.chat_template = DATED
    return tokenizer


def test_prompts_of_a_process_tell_the_day_that_it_is(dated, today):
    today(2026, 11, 30)
    prompts = [
        RagPrompt(dated, "Be brief."),
        RagPrompt.of_engine(dated, RagPrompt(dated, "Be brief.").lead_in),
    ]
    lead_ins = {prompt.lead_in for prompt in prompts}
    today(2026, 12, 1)
    prompts.append(RagPrompt(dated, "Be brief."))
    before = "<bos>Today is 1 December 2026.\n<system>Be brief.</><user>"
    for prompt in prompts:
        text = prompt.render([BEFORE, NOW])
        assert text.startswith(f"{before}Passage c.\n\nQuestion: What before?")
        assert "<user>Passage {a}.\n\nPassage b.\n\nQuestion: What {now}?" in text
    assert {prompt.lead_in for prompt in prompts} == lead_ins
    assert len(lead_ins) == 1


def test_kv_that_was_stored_yesterday_is_found_today(dated, today, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TOY)
    passage = "The lighthouse at Vell was built in 1821. " * 20
    for day in ((2026, 11, 30), (2026, 12, 1)):
        today(*day)
        engine = TransformersEngine(
            model,
            tokenizer=dated,
            instruction=dated.apply_chat_template(
                [{"role": "user", "content": ""}], tokenize=False
            ).removesuffix("</>"),
            store=TieredKVStore.open(kv_path=tmp_path),
            config=BlendConfig(min_tokens=0, cost_model=False),
        )
        done = engine.precompute([passage], progress=False)
        answer = engine.generate(
            [{"role": "user", "content": f"{passage}\n\nWhen?"}], SamplingParams(max_tokens=1)
        )
        engine.close()
    assert (done.computed, done.skipped) == (0, 1)
    assert [chunk.hit for chunk in answer.report.chunks] == [True]
