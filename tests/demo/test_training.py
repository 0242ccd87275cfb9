"""The program that trains the toys."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.demo.architectures import ARCHITECTURES, WINDOW, ModelShape
from tests.demo.batches import Batch, draw_batch
from tests.demo.curriculum import CURRICULUM, EXTENSION, Stage
from tests.demo.train import CONTINUED, Trainer, TrainingConfig, main, train
from tests.demo.transfer import adopt_weights
from tests.toy import TOY

TINY = TrainingConfig(
    tokens=10_000_000,
    repeat_tokens=250,
    warmup_steps=4,
    model=ModelShape(layers=2, hidden=32, heads=2, kv_heads=1, feed_forward=48),
    curriculum=(replace(CURRICULUM[0], batch_tokens=400),),
)


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
    batch = draw_batch(random.Random(0), TINY.curriculum[0], TINY.questions, trainer.tokenizer)
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
    batch = draw_batch(random.Random(0), stage, TINY.questions, trainer.tokenizer)
    open_keys = (batch.context_bias == 0).sum(-1)[0, 0]
    assert open_keys.max() < batch.context_length
    assert torch.equal(open_keys[:10], torch.arange(1, 11))


def test_command_line_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.demo.train.TrainingConfig", lambda: TINY)
    main(["--out", str(tmp_path / "model"), "--tokens", "300", "--seed", "3"])
    assert (tmp_path / "model" / "config.json").exists()


def _one(setting: str, trainer: Trainer, tokens: int = 300) -> Batch:
    """One prompt of a setting, longer than the window, with some questions."""
    shape = replace(CURRICULUM[0].shape, documents=(4, 4), context_tokens=(tokens, tokens))
    stage = Stage(shape, ((setting, 1.0),), separate=0.0, other_frames=0.0, batch_tokens=1)
    return draw_batch(random.Random(2), stage, 3, trainer.tokenizer)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_attends_as_the_model_does(architecture: str) -> None:
    """Each question's outputs are those of the context and that question alone."""
    trainer = Trainer(replace(TINY, architecture=architecture))
    batch = _one("adjacent", trainer)
    n, length = batch.context_length, batch.question_length
    assert n > 2 * WINDOW
    with torch.no_grad():
        together = trainer.hidden(batch)[1][0]
        trainer.model.set_attn_implementation("eager")
        for start in range(n, len(together), length):
            asked = slice(start, start + length)
            ids = torch.cat([batch.ids[0, :n], batch.ids[0, asked]])[None]
            alone = trainer.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(together[:n], alone[:n], atol=2e-3, rtol=1e-2)
            torch.testing.assert_close(together[asked], alone[n:], atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("setting", [setting for setting, _ in EXTENSION[-1].settings])
def test_every_setting_makes_batches_of_its_questions(setting: str) -> None:
    trainer = Trainer(TINY)
    batch = _one(setting, trainer)
    text = trainer.tokenizer.decode(batch.ids[0, batch.context_length :])
    assert batch.setting == setting
    assert text.count("Answer:") == (6 if setting == "turns" else 3)
    assert ("not known" in text) == (setting == "unanswerable")


def test_going_on_with_a_model_begins_with_its_weights(tmp_path: Path) -> None:
    train(replace(TINY, tokens=300), tmp_path / "model")
    old = load_file(tmp_path / "model" / "model.safetensors")
    trainer = Trainer(replace(TINY, seed=1))
    adopt_weights(trainer.model, tmp_path / "model", trainer.tokenizer)
    new = trainer.model.state_dict()
    assert all(torch.equal(new[name], value) for name, value in old.items())


@pytest.mark.parametrize("architecture", ["qknorm", "sliding"])
def test_another_architecture_begins_near_the_llama_toy(architecture: str) -> None:
    """Hidden states point the same way, which no two models with fresh weights do."""
    old, fresh = Trainer(TrainingConfig()), Trainer(TrainingConfig(architecture=architecture))
    new = Trainer(TrainingConfig(architecture=architecture))
    adopt_weights(old.model, TOY, old.tokenizer)
    adopt_weights(new.model, TOY, new.tokenizer)
    batch = _one("adjacent", old)
    with torch.no_grad():
        wanted, found, unlike = (each.hidden(batch)[0] for each in (old, new, fresh))
    assert torch.cosine_similarity(wanted, found, -1).mean() > 0.7
    assert torch.cosine_similarity(wanted, unlike, -1).mean() < 0.3


def test_only_a_llama_toy_becomes_another_architecture(tmp_path: Path) -> None:
    train(replace(TINY, tokens=300, architecture="qknorm"), tmp_path / "model")
    trainer = Trainer(replace(TINY, architecture="sliding"))
    with pytest.raises(ValueError, match="neither"):
        adopt_weights(trainer.model, tmp_path / "model", trainer.tokenizer)


def test_command_line_goes_on_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.demo.train.TrainingConfig", lambda: TINY)
    monkeypatch.setitem(CONTINUED, "curriculum", TINY.curriculum)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    main(["--out", first, "--tokens", "300", "--architecture", "llama"])
    main(["--out", second, "--tokens", "300", "--architecture", "sliding", "--init", first])
    loaded = AutoModelForCausalLM.from_pretrained(second, local_files_only=True)
    assert loaded.config.layer_types[:2] == ["sliding_attention", "full_attention"]
