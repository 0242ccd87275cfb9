"""The toy's folder."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.toy import INSTRUCTION, SETTINGS, TOY, DemoPrompt, generate_prompts

# Shares of right answers by full prefill, below what the weights reach (docs/quality.md).
RIGHT = {"adjacent": 0.9}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TOY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        TOY, local_files_only=True, dtype=torch.float32
    ).eval()


def _prompt_ids(prompt: DemoPrompt, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    pieces = tokenizer([text for _, text in prompt.segments()], add_special_tokens=False)[
        "input_ids"
    ]
    return [tokenizer.bos_token_id, *(token for piece in pieces for token in piece)]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("text", ["🦜 héllo", "a\r\nb\r\n", "\x00\x1b[0m\t ", "  two  spaces "])
def test_awkward_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == f"<bos>{text}"


def test_prompts_are_long_and_tokenize_alike_as_a_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    for prompt in generate_prompts("adjacent", 40, 11):
        ids = _prompt_ids(prompt, tokenizer)
        assert 1_000 <= len(ids) <= 1_500
        whole = "".join(text for _, text in prompt.segments())
        assert tokenizer(whole)["input_ids"] == ids


def test_answers_are_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for prompt in generate_prompts("adjacent", 40, 12):
        assert len(tokenizer.tokenize(f" {prompt.question.answer}")) == 1


def test_chat_template_renders_the_training_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = generate_prompts("adjacent", 1, 13)[0]
    whole = "".join(text for _, text in prompt.segments())
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": whole.removeprefix(f"{INSTRUCTION}\n\n")},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == f"<bos>{whole}"
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert ids == _prompt_ids(prompt, tokenizer)


def test_every_word_of_the_settings_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    words = {
        word
        for setting in SETTINGS
        for prompt in generate_prompts(setting, 20, 15)
        for _, text in prompt.segments()
        for word in re.findall(r"[A-Za-z]+", text)
    }
    assert [word for word in words if len(tokenizer.tokenize(f" {word}")) > 1] == []


@pytest.mark.parametrize("setting", RIGHT)
def test_full_prefill_answers_held_out_questions(
    setting: str, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
) -> None:
    assert _right(setting, tokenizer, model) >= RIGHT[setting]


def _right(setting: str, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel) -> float:
    """The share of held-out questions that full prefill answers."""
    prompts = generate_prompts(setting, 24, 14)
    right = 0
    for prompt in prompts:
        ids = torch.tensor([_prompt_ids(prompt, tokenizer)])
        with torch.no_grad():
            new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
        answer = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        right += answer == f" {prompt.question.answer}"
    return right / len(prompts)
