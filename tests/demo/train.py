"""Train the demo model from scratch: `python -m tests.demo.train --out DIR`.

Four things make so small a model learn to look a subject up in an earlier chunk. A warm-up on
repeated stretches of random tokens forms content-based copying. A curriculum widens the name
pools and lengthens the prompts whenever running accuracy allows. Each prompt asks many questions,
hidden from each other by the mask and all placed right after the context. A linear probe on a
middle layer, thrown away afterwards, must tell at each value and at each question's end who the
subject is. In a share of batches documents do not see each other, which is how a chunk's KV looks
when computed in its own document.

Every step draws its batch from a generator seeded by (seed, step), so a checkpoint of weights,
optimizer state and counters resumes to the very same weights as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from tests.demo.architectures import ARCHITECTURES, DEFAULT_ARCHITECTURE, ModelShape, build_model
from tests.demo.batches import (
    DIRECT,
    END,
    NAME,
    OTHER,
    REFERRING,
    Batch,
    draw_batch,
    draw_repeats,
)
from tests.demo.curriculum import CURRICULUM, EXTENSION, Stage
from tests.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, build_tokenizer, save_tokenizer
from tests.demo.transfer import adopt_weights
from tests.toy import TOY, names_and_values

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides the weights."""

    seed: int = 0
    tokens: int = 10_500_000
    repeat_tokens: int = 2_000
    questions: int = 18
    learning_rate: float = 2e-3
    warmup_steps: int = 150
    decay_share: float = 0.3
    restart_at: int = 8_500_000
    restart_rate: float = 1e-3
    weight_decay: float = 0.05
    advance_at: float = 0.82
    bfloat16: bool = True
    architecture: str = DEFAULT_ARCHITECTURE
    model: ModelShape = field(default_factory=ModelShape)
    curriculum: tuple[Stage, ...] = CURRICULUM


# What differs when training goes on with a trained model's weights.
CONTINUED: dict[str, Any] = {
    "curriculum": EXTENSION,
    "repeat_tokens": 0,
    "learning_rate": 1e-3,
    "decay_share": 0.5,
}


@dataclass
class Progress:
    """The counters of a run; with weights and optimizer state, all that a checkpoint holds."""

    step: int = 0
    tokens: int = 0
    stage: int = 0
    stage_step: int = 0
    repeat_loss: float = math.inf
    answer_loss: float = 0.0
    direct: float = 0.0
    referring: float = 0.0
    subject: float = 0.0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)


class Trainer:
    """One training run: model, optimizer and counters."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.tokenizer = build_tokenizer()
        self.model = build_model(
            config.architecture, config.model, len(self.tokenizer), config.seed
        )
        width = config.model.hidden
        self.probe = torch.nn.Linear(width, width, bias=False)
        self.progress = Progress()
        self.before: Any = None
        words = sorted(names_and_values())
        self.copied = torch.tensor(self.tokenizer.convert_tokens_to_ids([f"Ġ{w}" for w in words]))
        self.parameters = [*self.model.parameters(), *self.probe.parameters()]
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.98),
        )

    @property
    def done(self) -> bool:
        """Whether the token budget is used up."""
        return self.progress.tokens >= self.config.tokens

    def step(self) -> None:
        """Draw one batch and learn from it."""
        began = time.monotonic()
        config, progress = self.config, self.progress
        rng = random.Random(f"{config.seed}/{progress.step}")
        repeats = self._wants_repeats()
        if repeats:
            batch = draw_repeats(rng, self.copied, config.repeat_tokens)
        else:
            stage = config.curriculum[progress.stage]
            batch = draw_batch(rng, stage, config.questions, self.tokenizer)
        loss = self._loss(batch, rng, repeats)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        progress.step += 1
        progress.tokens += batch.tokens
        self._advance()
        progress.seconds += time.monotonic() - began

    def _wants_repeats(self) -> bool:
        progress = self.progress
        if (
            not self.config.repeat_tokens
            or progress.stage > 0
            or min(progress.direct, progress.referring) > 0.6
        ):
            return False
        return progress.repeat_loss > 1.0 or progress.step % 6 == 0

    def _learning_rate(self) -> float:
        """Constant and then a cosine down to ``restart_at`` tokens; from there one more cosine."""
        config, progress = self.config, self.progress
        warm = min(1.0, (progress.step + 1) / config.warmup_steps)
        first = min(config.restart_at, config.tokens)
        if progress.tokens < first:
            peak, share = config.learning_rate, progress.tokens / first
            decay = max(0.0, (share - 1 + config.decay_share) / config.decay_share)
        else:
            peak = config.restart_rate
            decay = (progress.tokens - first) / (config.tokens - first)
        return peak * warm * max(0.02, (1 + math.cos(math.pi * decay)) / 2)

    def _loss(self, batch: Batch, rng: random.Random, repeats: bool) -> Tensor:
        """Loss on answers, half of it on last names, a tenth on a sample of everything else."""
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        sampled = torch.rand(batch.ids.shape, generator=generator) < (0.0 if repeats else 0.1)
        wanted = (batch.target_kinds != OTHER) | (sampled & (batch.targets != PAD_ID))
        kinds, targets = batch.target_kinds[wanted], batch.targets[wanted]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.bfloat16):
            middle, last = self.hidden(batch)
            logits = self.model.lm_head(last[wanted]).float()
            told = batch.subjects != PAD_ID
            named = self.model.lm_head(self.probe(middle[told])).float()
        losses = cross_entropy(logits, targets, reduction="none")
        answers = (kinds == DIRECT) | (kinds == REFERRING)
        self._record(losses.detach(), logits.detach().argmax(-1) == targets, kinds, batch.setting)
        loss = losses[answers].mean()
        if not repeats:
            loss = loss + 0.5 * cross_entropy(named, batch.subjects[told])
            right = named.detach().argmax(-1) == batch.subjects[told]
            self.progress.subject += 0.05 * (right.float().mean().item() - self.progress.subject)
        for kind, weight in ((NAME, 0.5), (OTHER, 0.1), (END, 0.1)):
            chosen = kinds == kind
            if chosen.any():
                loss = loss + weight * losses[chosen].mean()
        return loss

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The hidden states of every token of a batch, in the middle and at the end."""
        output = self.model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            batch=batch,
            use_cache=False,
            output_hidden_states=True,
        )
        return output.hidden_states[self.config.model.probe_layer], output.last_hidden_state

    def _record(self, losses: Tensor, correct: Tensor, kinds: Tensor, setting: str) -> None:
        """Move the averages of what was right towards this batch; repeats have no setting."""
        progress = self.progress
        if not setting:
            progress.repeat_loss = losses[kinds == DIRECT].mean().item()
            return
        answers = (kinds == DIRECT) | (kinds == REFERRING)
        progress.answer_loss = losses[answers].mean().item()
        share = correct[answers].float().mean().item()
        before = progress.accuracy.get(setting, 0.0)
        progress.accuracy[setting] = before + 0.05 * (share - before)
        if setting == "adjacent":
            direct = correct[kinds == DIRECT].float().mean().item()
            referring = correct[kinds == REFERRING].float().mean().item()
            progress.direct += 0.05 * (direct - progress.direct)
            progress.referring += 0.05 * (referring - progress.referring)

    def _advance(self) -> None:
        progress, stage = self.progress, self.config.curriculum[self.progress.stage]
        known = [progress.accuracy.get(setting, 0.0) for setting, _ in stage.settings]
        ready = min(progress.direct, progress.referring, *known) > self.config.advance_at
        ready = ready and progress.step - progress.stage_step > 40
        last = progress.stage == len(self.config.curriculum) - 1
        if not last and (ready or progress.tokens > stage.until * self.config.tokens):
            progress.stage += 1
            progress.stage_step = progress.step
            logger.info("stage %d begins at step %d", progress.stage, progress.step)

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, optimizer state and counters; a kill midway leaves the old checkpoint."""
        fresh = directory.with_name(directory.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        save_file(self._weights(), fresh / "model.safetensors")
        moments = {
            f"{index}.{name}": value
            for index, state in self.optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        save_file(moments, fresh / "optimizer.safetensors")
        state = {"progress": asdict(self.progress), "config": asdict(self.config)}
        (fresh / "state.json").write_text(json.dumps(state, indent=1))
        shutil.rmtree(directory, ignore_errors=True)
        fresh.rename(directory)

    def load_checkpoint(self, directory: Path) -> None:
        """Continue a run of the same configuration."""
        state = json.loads((directory / "state.json").read_text())
        if state["config"] != json.loads(json.dumps(asdict(self.config))):
            raise ValueError(f"the checkpoint in {directory} is of another configuration")
        self.progress = Progress(**state["progress"])
        weights = load_file(directory / "model.safetensors")
        self.probe.load_state_dict({"weight": weights.pop("probe.weight")})
        self.model.load_state_dict(weights, strict=False)
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(directory / "optimizer.safetensors").items():
            index, name = key.split(".")
            moments.setdefault(int(index), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def save_model(self, directory: Path) -> None:
        """Write the folder that transformers loads, and how it came about."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        if self.config.architecture != DEFAULT_ARCHITECTURE:
            _halve(directory / "model.safetensors")
        GenerationConfig(
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            do_sample=False,
            max_new_tokens=16,
        ).save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory)
        record: dict[str, Any] = {"progress": asdict(self.progress), "config": asdict(self.config)}
        record["config"].pop("curriculum")
        if self.before:
            record["before"] = self.before
        (directory / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    def _weights(self) -> dict[str, Tensor]:
        """All weights and the probe's, once; the tied output layer is the embedding."""
        state = self.model.state_dict()
        state.pop("lm_head.weight")
        return {**state, "probe.weight": self.probe.weight.detach()}


def _halve(path: Path) -> None:
    """Store weights in bfloat16; the configuration still says in which dtype to compute."""
    halved = {name: value.bfloat16() for name, value in load_file(path).items()}
    save_file(halved, path, metadata={"format": "pt"})


def train(
    config: TrainingConfig,
    out: Path,
    *,
    init: Path | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    minutes: float = math.inf,
    save_every: int = 200,
) -> Progress:
    """Train until the token budget or the time is used up, then write the model folder."""
    trainer = Trainer(config)
    if init:
        adopt_weights(trainer.model, init, trainer.tokenizer)
        trainer.before = json.loads((init / "training.json").read_text())
    if checkpoint and resume and checkpoint.exists():
        trainer.load_checkpoint(checkpoint)
        logger.info("resumed at step %d", trainer.progress.step)
    progress = trainer.progress
    deadline = time.monotonic() + 60 * minutes
    while not trainer.done and time.monotonic() < deadline:
        trainer.step()
        if progress.step % 25 == 0:
            _log(progress)
        if checkpoint and progress.step % save_every == 0:
            trainer.save_checkpoint(checkpoint)
    if checkpoint:
        trainer.save_checkpoint(checkpoint)
    trainer.save_model(out)
    return progress


def _log(progress: Progress) -> None:
    logger.info(
        "step %d stage %d tokens %.2fM %.0fs (%.0f/s) repeat loss %.2f answer loss %.2f "
        "direct %.3f referring %.3f subject %.3f | %s",
        progress.step,
        progress.stage,
        progress.tokens / 1e6,
        progress.seconds,
        progress.tokens / progress.seconds,
        progress.repeat_loss,
        progress.answer_loss,
        progress.direct,
        progress.referring,
        progress.subject,
        " ".join(f"{name} {share:.3f}" for name, share in sorted(progress.accuracy.items())),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(prog="python -m tests.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=TOY, help="folder for the model")
    parser.add_argument("--tokens", type=int, default=defaults.tokens, help="training tokens")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=defaults.architecture)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--init", type=Path, help="folder of a model to go on with, see EXTENSION")
    parser.add_argument("--checkpoint", type=Path, help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    config = replace(
        defaults,
        tokens=options.tokens,
        seed=options.seed,
        architecture=options.architecture,
    )
    if options.init:
        config = replace(config, **CONTINUED)
    train(
        config,
        options.out,
        init=options.init,
        checkpoint=options.checkpoint,
        resume=options.resume,
        minutes=options.minutes,
    )


if __name__ == "__main__":
    main()
