"""Pretrained models by their names: tokens, end tokens, precision, answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from cacheblend_rag import SamplingParams, TransformersEngine, load_tokenizer, models

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def engine(smollm2_folder: Path) -> Iterator[TransformersEngine]:
    with closing(TransformersEngine("smollm2", dtype="float32")) as opened:
        yield opened


def test_smollm2_answers_a_question_and_stops(engine: TransformersEngine) -> None:
    answer = engine.generate(CAPITAL, SamplingParams(max_tokens=20))
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert (engine.model_name, engine.context_window) == ("smollm2", 8192)
    assert engine.blend_refusal is None


def test_smollm2_has_its_roles_and_its_template(
    engine: TransformersEngine, smollm2_folder: Path
) -> None:
    tokenizer = load_tokenizer("smollm2")
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert roles == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    generation = json.loads((smollm2_folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert tokenizer.model_max_length == 8192
    text = tokenizer.apply_chat_template(CAPITAL, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_smollm2s_tokens_are_those_it_was_trained_on(smollm2_folder: Path) -> None:
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer("the year 1984").tokens() == ["the", "Ġyear", "Ġ", "1", "9", "8", "4"]
    assert tokenizer("a  12").tokens() == ["a", "ĠĠ", "1", "2"]
    for text in ("Größe, naïve, 漢字 🙂\n\n\tx", "it's  1,000.50 €"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_smollm2s_weights_are_the_same_in_either_precision(smollm2_folder: Path) -> None:
    with safe_open(smollm2_folder / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}
    whole, halves = (
        AutoModelForCausalLM.from_pretrained(models.resolve("smollm2"), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for (name, exact), (_, stored) in zip(
        whole.named_parameters(), halves.named_parameters(), strict=True
    ):
        assert torch.equal(exact, stored.float()), name
