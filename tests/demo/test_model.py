"""The shipped model folder and the program that makes it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.demo.corpus import INSTRUCTION, DemoPrompt, generate_prompts
from tests.demo.tokenizer import build_tokenizer
from tests.demo.train import (
    CURRICULUM,
    ModelShape,
    Stage,
    Trainer,
    TrainingConfig,
    draw_batch,
    main,
    train,
)

TINY = TrainingConfig(
    tokens=10_000_000,
    repeat_tokens=250,
    warmup_steps=4,
    model=ModelShape(layers=2, hidden=32, heads=2, kv_heads=1, feed_forward=48),
    curriculum=(replace(CURRICULUM[0], batch_tokens=400),),
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        MODEL_FOLDER, local_files_only=True, dtype=torch.float32
    ).eval()


def _prompt_ids(prompt: DemoPrompt, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    pieces = tokenizer([text for _, text in prompt.segments()], add_special_tokens=False)[
        "input_ids"
    ]
    return [tokenizer.bos_token_id, *(token for piece in pieces for token in piece)]


def test_the_folder_is_small_enough_to_ship() -> None:
    assert (MODEL_FOLDER / "model.safetensors").stat().st_size <= 12 * 2**20


def test_shipped_tokenizer_is_the_one_the_code_builds(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


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


def test_full_prefill_answers_held_out_questions(
    tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
) -> None:
    prompts = generate_prompts("adjacent", 24, 14)
    right = 0
    for prompt in prompts:
        ids = torch.tensor([_prompt_ids(prompt, tokenizer)])
        with torch.no_grad():
            new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
        answer = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        right += answer == f" {prompt.question.answer}"
    assert right / len(prompts) >= 0.9


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = Trainer(TINY)
    for _ in range(6):
        straight.step()
    halted = Trainer(TINY)
    for _ in range(3):
        halted.step()
    halted.save_checkpoint(tmp_path / "checkpoint")
    resumed = Trainer(TINY)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    for _ in range(3):
        resumed.step()
    expected, weights = straight.model.state_dict(), resumed.model.state_dict()
    assert resumed.progress.step == straight.progress.step == 6
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    Trainer(TINY).save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="another configuration"):
        Trainer(replace(TINY, seed=1)).load_checkpoint(tmp_path)


def test_training_writes_a_folder_that_loads(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    config = replace(TINY, tokens=1_500)
    progress = train(config, tmp_path / "model", checkpoint=checkpoint)
    assert progress.tokens >= 1_500
    again = train(config, tmp_path / "model", checkpoint=checkpoint, resume=True)
    assert again.step == progress.step
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(loaded.model.norm.weight, saved["model.norm.weight"])


def test_questions_do_not_see_each_other() -> None:
    """Changing one question's tokens changes no other question's outputs."""
    trainer = Trainer(TINY)
    batch = draw_batch(random.Random(0), TINY.curriculum[0], TINY, trainer.tokenizer)
    changed = replace(batch, ids=batch.ids.clone())
    first = slice(batch.context_length, batch.context_length + batch.question_length)
    changed.ids[:, first] = 5
    with torch.no_grad():
        before, after = trainer.hidden(batch)[1], trainer.hidden(changed)[1]
    assert torch.equal(before[:, : first.start], after[:, : first.start])
    assert torch.equal(before[:, first.stop :], after[:, first.stop :])
    assert not torch.equal(before[:, first], after[:, first])


def test_separate_documents_do_not_see_each_other() -> None:
    trainer = Trainer(TINY)
    stage = Stage(TINY.curriculum[0].shape, separate=1.0, other_frames=0.0, batch_tokens=400)
    batch = draw_batch(random.Random(0), stage, TINY, trainer.tokenizer)
    open_keys = (batch.context_bias == 0).sum(-1)[0, 0]
    assert open_keys.max() < batch.context_length
    assert torch.equal(open_keys[:10], torch.arange(1, 11))


def test_command_line_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.demo.train.TrainingConfig", lambda: TINY)
    main(["--out", str(tmp_path / "model"), "--tokens", "300", "--seed", "3"])
    assert (tmp_path / "model" / "config.json").exists()
