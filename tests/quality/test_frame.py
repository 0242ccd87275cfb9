"""The frame of an evaluation's prompts is the one that `ask` renders."""

from __future__ import annotations

import pytest

from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.quality.dataset import EvalQuestion, PromptFrame
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from cacheblend_rag.text.chunk import Document
from tests.toy import TOY

DOCUMENTS = (Document("a", ("One.", "Two.")), Document("b", ("Three.",)))
CHUNKS = [chunk for document in DOCUMENTS for chunk in document.to_chunks()]
QUESTION = EvalQuestion("Who?", ("red",), (CHUNKS[2], CHUNKS[1]), DOCUMENTS)


class Templated:
    """A tokenizer with a chat template like SmolLM2's."""

    chat_template = "yes"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        told = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return f"{told}<|im_start|>assistant\n"


class Plain:
    chat_template = None


@pytest.mark.parametrize("tokenizer", [Templated(), Plain(), load_tokenizer(TOY)])
def test_prompts_are_those_of_ask(tokenizer):
    frame = PromptFrame.of(tokenizer, "Be brief.")
    ask = RagPrompt(tokenizer, "Be brief.")
    texts = tuple(passage.text for passage in QUESTION.passages)
    prompt = frame.prompt(QUESTION)
    assert prompt.text == ask.render([Turn("Who?", texts)])
    assert frame.without_passages(QUESTION).text == ask.render([Turn("Who?", ())])
    assert (frame.opening, prompt.is_rendered) == (ask.lead_in, bool(tokenizer.chat_template))
    assert [s.chunk for s in prompt.segments if s.chunk] == list(QUESTION.passages)
