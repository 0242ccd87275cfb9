"""SmolLM2, by its name, reads real passages in its own tokens, and answers as it does alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, Document, SamplingParams, TransformersEngine, load_tokenizer
from cacheblend_rag.demo.passages import load_passages

SAMPLE = load_passages()
TEXTS = [passage.text for passage in SAMPLE.passages]
QUESTION = SAMPLE.questions[0].question
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
EXACT = BlendConfig(recompute_ratio=1.0, min_tokens=0)
JOINS: dict[str, Callable[[list[str]], str]] = {
    "blank lines": "\n\n".join,
    "lines": "\n".join,
    "spaces": " ".join,
    "nothing": "".join,
    "list": lambda texts: "\n".join(f"- {text}" for text in texts),
    "numbers": lambda texts: "\n\n".join(f"[{i}] {text}" for i, text in enumerate(texts, 1)),
    "XML": lambda texts: "\n".join(f"<document>{text}</document>" for text in texts),
    "quotes": lambda texts: "\n".join(f'"{text}"' for text in texts),
    "JSON": lambda texts: ", ".join(f'{{"content": "{text}"}}' for text in texts),
}


@pytest.fixture(scope="module")
def engine(smollm2_folder: Path) -> Iterator[TransformersEngine]:
    with closing(TransformersEngine("smollm2", dtype="float32", config=EXACT)) as opened:
        documents = [Document(f"passage {i}", (text,)) for i, text in enumerate(TEXTS)]
        opened.precompute(documents, progress=False)
        yield opened


def own_answer(engine: TransformersEngine, ids: list[int]) -> tuple[int, ...]:
    """The answer of transformers' own ``generate``, without the token that ends it."""
    out: Any = engine.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False,
        max_new_tokens=GREEDY.max_tokens,
    )  # fmt: skip
    new = out[0, len(ids) :].tolist()
    return tuple(new[:-1] if new[-1] == engine.tokenizer.eos_token_id else new)


@pytest.mark.parametrize("join", JOINS)
def test_prompts_have_the_tokenizers_own_tokens_and_few_are_lost(
    engine: TransformersEngine, join: str
) -> None:
    for start in range(0, len(TEXTS) - 4, 4):
        texts = TEXTS[start : start + 4]
        prompt = f"Answer from the passages.\n\n{JOINS[join](texts)}\n\nQuestion: {QUESTION}"
        prepared = engine.prepare(prompt)
        assert list(prepared.token_ids) == engine.tokenizer(prompt).input_ids
        assert [span.chunk.text for span in prepared.encoded.spans] == texts
        lost = [(len(span.before), len(span.after)) for span in prepared.encoded.spans]
        assert max(map(max, lost)) <= 3
        if join == "blank lines":
            assert not any(map(any, lost))


def test_ratio_1_is_the_models_own_answer_to_the_text(engine: TransformersEngine) -> None:
    prompt = f"{JOINS['numbers'](TEXTS[:3])}\n\nQuestion: {QUESTION}\nAnswer:"
    wanted = own_answer(engine, engine.tokenizer(prompt).input_ids)
    blended = engine.generate(prompt, GREEDY)
    assert [chunk.hit for chunk in blended.report.chunks] == [True] * 3
    assert blended.token_ids == wanted
    assert engine.generate_full(prompt, GREEDY).token_ids == wanted


def test_ratio_1_is_the_models_own_answer_to_a_chat(engine: TransformersEngine) -> None:
    content = "\n\n".join([*TEXTS[:3], QUESTION])
    messages = [{"role": "user", "content": content}]
    ids = engine.tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(engine.prepare(messages).token_ids) == ids
    wanted = own_answer(engine, ids)
    blended = engine.generate(messages, GREEDY)
    assert [chunk.hit for chunk in blended.report.chunks] == [True] * 3
    assert blended.token_ids == wanted
    assert engine.generate_full(messages, GREEDY).token_ids == wanted


# The model by its name


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
