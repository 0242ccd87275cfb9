"""What a prompt template says before its first variable."""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate

from langchain_cacheblend.instruction import prompt_instruction
from tests.models import make_tokenizer


def test_the_chat_template_is_part_of_it() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer."), ("human", "Context:\n{context}\n\nQuestion: {input}")]
    )
    assert prompt_instruction(prompt, make_tokenizer()) == "<bos>Answer.\n\nContext:\n"
    assert prompt_instruction(prompt, make_tokenizer(chat_template=False)) == (
        "Answer.\n\nContext:\n"
    )


def test_it_ends_at_the_first_variable_whatever_that_is() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer {user}."), MessagesPlaceholder("history"), ("human", "{context}")]
    )
    tokenizer = make_tokenizer(chat_template=False)
    assert prompt_instruction(prompt, tokenizer) == "Answer "
    assert prompt_instruction(prompt.partial(user="Anna"), tokenizer) == "Answer Anna.\n\n"


def test_plain_templates_count_too() -> None:
    prompt = PromptTemplate.from_template("Use this.\n{context}\nQuestion: {input}")
    assert prompt_instruction(prompt, make_tokenizer(chat_template=False)) == "Use this.\n"


def test_braces_in_jinja_templates_are_no_variables() -> None:
    prompt = PromptTemplate.from_template(
        'Reply as {"a": 1}. {{ context }}', template_format="jinja2"
    )
    assert prompt_instruction(prompt, make_tokenizer(chat_template=False)) == 'Reply as {"a": 1}. '
