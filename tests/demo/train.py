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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.demo.corpus import (
    BEGUN_FRAME,
    CHUNK_SEPARATOR,
    DEFAULT_FRAME,
    EVALUATION_SHAPE,
    FIRST_NAMES,
    OTHER_FRAMES,
    CorpusShape,
    DemoDocument,
    PromptFrame,
    draw_documents,
    names_and_values,
)
from tests.demo.tokenizer import (
    BOS_ID,
    EOS_ID,
    MAX_LENGTH,
    PAD_ID,
    build_tokenizer,
    save_tokenizer,
)

logger = logging.getLogger(__name__)

ATTENTION = "cacheblend_demo_training"

# What a position's next token is, for the loss and the accuracy.
OTHER, DIRECT, REFERRING, NAME, END = 0, 1, 2, 3, 4

HIDDEN = -1e4
BLOCK = 256


@dataclass(frozen=True)
class ModelShape:
    """The size of the decoder, and after how many layers the probe reads."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 384
    probe_layer: int = 2


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        shape: what prompts look like.
        separate: share of batches in which documents do not see each other.
        other_frames: share of batches in another wording than the default one.
        begun: share of batches that ask by beginning a statement, which is easier.
        batch_tokens: tokens a batch, padding included.
    """

    shape: CorpusShape
    separate: float = 0.25
    other_frames: float = 0.2
    begun: float = 0.0
    batch_tokens: int = 8_000


def _small(**changes: Any) -> CorpusShape:
    base = CorpusShape(
        documents=(3, 3),
        chunks=(2, 2),
        total_chunks=(0, 99),
        direct_facts=(1, 2),
        referring_facts=(1, 2),
        context_tokens=(0, 0),
        mixed=0.1,
    )
    return replace(base, **changes)


def _short(names: int, *, begun: float, **changes: Any) -> Stage:
    shape = _small(names=(names, names), **changes)
    return Stage(shape, separate=0.0, other_frames=0.0, begun=begun, batch_tokens=4_000)


CURRICULUM = (
    _short(4, begun=1.0, explicit=0.4, wordings=1),
    _short(8, begun=0.4, explicit=0.2, wordings=1),
    _short(8, begun=0.2, explicit=0.1),
    _short(8, begun=0.1, explicit=0.1, context_tokens=(120, 200)),
    Stage(
        _small(
            names=(16, 16), explicit=0.1, documents=(3, 4), referring_facts=(2, 3),
            chunks=(2, 3), context_tokens=(200, 320),
        ),
        batch_tokens=6_000,
    ),
    Stage(
        _small(
            names=(32, 48), explicit=0.05, documents=(4, 5), referring_facts=(2, 4),
            chunks=(2, 3), context_tokens=(350, 600),
        )
    ),
    Stage(replace(EVALUATION_SHAPE, mixed=0.15)),
)  # fmt: skip


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
    model: ModelShape = field(default_factory=ModelShape)
    curriculum: tuple[Stage, ...] = CURRICULUM


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


@dataclass(frozen=True)
class Batch:
    """Contexts padded to one length, then each prompt's questions, all padded to one length.

    `target_kinds` tells what a position's target is; `subjects` is the first name of a value's or
    a question's subject, else padding. The biases are added to attention scores:
    `context_bias` (query, key) among the context's tokens, `padding_bias` (key) for questions.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    target_kinds: Tensor
    subjects: Tensor
    context_length: int
    question_length: int
    context_bias: Tensor
    padding_bias: Tensor

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.ids != PAD_ID).sum())


@dataclass(frozen=True)
class _Question:
    """Token ids of a question and its answer, what follows each, and whom it is about."""

    ids: list[int]
    target_kinds: list[int]
    subject: int
    end: int


@dataclass(frozen=True)
class _Example:
    """One prompt's token ids; owners are document indices, -1 for text between documents."""

    context: list[int]
    owners: list[int]
    subjects: dict[int, int]
    questions: list[_Question]


Encode = Callable[[Sequence[str]], list[list[int]]]


def split_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    batch: Batch,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a batch: the context to itself, each question to the context and to itself."""
    dtype, groups, n = value.dtype, query.shape[1] // key.shape[1], batch.context_length
    query = (query * scaling).to(dtype)
    key = key.to(dtype).repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    bias = batch.context_bias
    out = [_attend_context(query[:, :, :n], key[:, :, :n], value[:, :, :n], bias)]
    if query.shape[2] > n:
        out.append(_attend_questions(query[:, :, n:], key, value, batch))
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def _attend_context(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """In blocks of queries, so that most of the upper triangle is never computed."""
    blocks = []
    for start in range(0, query.shape[2], BLOCK):
        stop = min(start + BLOCK, query.shape[2])
        scores = query[:, :, start:stop] @ key[:, :, :stop].transpose(-1, -2)
        weights = (scores + bias[:, :, start:stop, :stop]).softmax(-1)
        blocks.append(weights @ value[:, :, :stop])
    return torch.cat(blocks, 2)


def _attend_questions(query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
    n, length = batch.context_length, batch.question_length
    size, heads, rows, width = query.shape
    split = (size, heads, rows // length, length, width)
    context = query @ key[:, :, :n].transpose(-1, -2) + batch.padding_bias
    own_key, own_value = key[:, :, n:].reshape(split), value[:, :, n:].reshape(split)
    own = query.reshape(split) @ own_key.transpose(-1, -2) + _causal_bias(length, query.dtype)
    weights = torch.cat([context, own.reshape(size, heads, rows, length)], -1).softmax(-1)
    own_weights = weights[..., n:].reshape(*split[:-1], length)
    return weights[..., :n] @ value[:, :, :n] + (own_weights @ own_value).reshape(query.shape)


def _causal_bias(length: int, dtype: torch.dtype) -> Tensor:
    return torch.full((length, length), HIDDEN, dtype=dtype).triu(1)


AttentionInterface.register(ATTENTION, split_attention)


def build_model(shape: ModelShape, vocabulary: int, seed: int) -> LlamaForCausalLM:
    """A Llama decoder with fresh weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model: LlamaForCausalLM = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION)
    return model


def draw_batch(
    rng: random.Random, stage: Stage, config: TrainingConfig, tokenizer: PreTrainedTokenizerFast
) -> Batch:
    """As many prompts of one stage, in one wording, as the batch has room for."""
    frame, shape = DEFAULT_FRAME, stage.shape
    if rng.random() < stage.begun:
        frame, shape = BEGUN_FRAME, replace(shape, begun=True)
    elif rng.random() < stage.other_frames:
        frame = rng.choice(OTHER_FRAMES)
    examples: list[_Example] = []
    context, question, count = 0, 0, 0
    while True:
        example = _draw_example(rng, shape, frame, config.questions, tokenizer)
        context = max(context, len(example.context))
        question = max(question, *(len(q.ids) for q in example.questions))
        count = max(count, len(example.questions))
        padded = context + question * count
        if examples and padded * (len(examples) + 1) > stage.batch_tokens:
            break
        examples.append(example)
    return _collate(examples, separate=rng.random() < stage.separate)


def _draw_example(
    rng: random.Random,
    shape: CorpusShape,
    frame: PromptFrame,
    questions: int,
    tokenizer: PreTrainedTokenizerFast,
) -> _Example:
    documents, asked = draw_documents(rng, shape)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return cast(
            "list[list[int]]", tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        )

    context, owners = _encode_context(documents, frame, encode)
    tails = encode([frame.tail.format(question=q.question) for q in asked])
    answers = encode([f" {q.answer}" for q in asked])
    names = set(tokenizer.convert_tokens_to_ids([f"Ġ{name}" for name in FIRST_NAMES]))
    subjects: dict[int, int] = {}
    encoded: list[_Question] = []
    for question, tail, answer in zip(asked, tails, answers, strict=True):
        kinds = [NAME if token in names else OTHER for token in tail]
        kinds[-1] = DIRECT if question.kind == "direct" else REFERRING
        subject = next(token for token in tail if token in names)
        subjects[context.index(answer[0], owners.index(question.document))] = subject
        encoded.append(_Question(tail + answer, [*kinds, END], subject, len(tail) - 1))
    return _Example(context, owners, subjects, encoded[:questions])


def _encode_context(
    documents: Sequence[DemoDocument], frame: PromptFrame, encode: Encode
) -> tuple[list[int], list[int]]:
    """Token ids of everything before the tail, and the document that each belongs to."""
    pieces: list[tuple[str, int]] = [(frame.head, -1)]
    for index, document in enumerate(documents):
        for position, chunk in enumerate(document.chunks):
            if index + position:
                pieces.append((CHUNK_SEPARATOR, index if position else -1))
            pieces.append((chunk, index))
    encoded = encode([text for text, _ in pieces])
    ids, owners = [BOS_ID], [-1]
    for (_, owner), tokens in zip(pieces, encoded, strict=True):
        ids += tokens
        owners += [owner] * len(tokens)
    return ids, owners


def _collate(examples: Sequence[_Example], *, separate: bool) -> Batch:
    context = max(len(example.context) for example in examples)
    question = max(len(q.ids) for example in examples for q in example.questions)
    count = max(len(example.questions) for example in examples)
    size = (len(examples), context + question * count)
    ids, targets = torch.full(size, PAD_ID), torch.full(size, PAD_ID)
    kinds, positions = torch.full(size, OTHER), torch.zeros(size, dtype=torch.long)
    subjects = torch.full(size, PAD_ID)
    owners = torch.full((len(examples), context), -1)
    for row, example in enumerate(examples):
        n = len(example.context)
        ids[row, :n] = torch.tensor(example.context)
        targets[row, : n - 1] = ids[row, 1:n]
        positions[row, :n] = torch.arange(n)
        owners[row, :n] = torch.tensor(example.owners)
        for position, subject in example.subjects.items():
            subjects[row, position] = subject
        for number, asked in enumerate(example.questions):
            start = context + number * question
            span = slice(start, start + len(asked.ids))
            ids[row, span] = torch.tensor(asked.ids)
            targets[row, span] = torch.tensor([*asked.ids[1:], EOS_ID])
            kinds[row, span] = torch.tensor(asked.target_kinds)
            positions[row, span] = torch.arange(n, n + len(asked.ids))
            subjects[row, start + asked.end] = asked.subject
    padding = torch.zeros(len(examples), 1, 1, context, dtype=torch.bfloat16)
    padding[:, 0, 0][ids[:, :context] == PAD_ID] = HIDDEN
    bias = _causal_bias(context, torch.bfloat16)[None, None]
    if separate:
        bias = torch.where(_same_document(owners)[:, None], bias, HIDDEN)
    return Batch(ids, positions, targets, kinds, subjects, context, question, bias, padding)


def _same_document(owners: Tensor) -> Tensor:
    """Documents see themselves and the text before the first document; text sees everything."""
    head = (owners >= 0).cumsum(1) == 0
    same = owners[:, :, None] == owners[:, None, :]
    return same | head[:, None, :] | (owners == -1)[:, :, None]


def draw_repeats(rng: random.Random, choices: Tensor, tokens: int, length: int = 112) -> Batch:
    """Tokens drawn from `choices` in which one stretch comes back at a random distance."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    size = (tokens // length, length)
    ids = choices[torch.randint(len(choices), size, generator=generator)]
    kinds = torch.full(size, OTHER)
    for row in range(size[0]):
        stretch = rng.randrange(20, 48)
        first = rng.randrange(0, 6)
        second = rng.randrange(first + stretch, length - stretch + 1)
        ids[row, second : second + stretch] = ids[row, first : first + stretch].clone()
        kinds[row, second : second + stretch - 1] = DIRECT
    return Batch(
        ids=ids,
        positions=torch.arange(length).expand(size),
        targets=torch.cat([ids[:, 1:], ids[:, :1]], 1),
        target_kinds=kinds,
        subjects=torch.full(size, PAD_ID),
        context_length=length,
        question_length=0,
        context_bias=_causal_bias(length, torch.bfloat16)[None, None],
        padding_bias=torch.zeros(size[0], 1, 1, length, dtype=torch.bfloat16),
    )


class Trainer:
    """One training run: model, optimizer and counters."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.tokenizer = build_tokenizer()
        self.model = build_model(config.model, len(self.tokenizer), config.seed)
        width = config.model.hidden
        self.probe = torch.nn.Linear(width, width, bias=False)
        self.progress = Progress()
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
            batch = draw_batch(rng, stage, config, self.tokenizer)
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
        if progress.stage > 0 or min(progress.direct, progress.referring) > 0.6:
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
        self._record(losses.detach(), logits.detach().argmax(-1) == targets, kinds, repeats)
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

    def _record(self, losses: Tensor, correct: Tensor, kinds: Tensor, repeats: bool) -> None:
        progress = self.progress
        if repeats:
            progress.repeat_loss = losses[kinds == DIRECT].mean().item()
            return
        answers = (kinds == DIRECT) | (kinds == REFERRING)
        progress.answer_loss = losses[answers].mean().item()
        direct = correct[kinds == DIRECT].float().mean().item()
        referring = correct[kinds == REFERRING].float().mean().item()
        progress.direct += 0.05 * (direct - progress.direct)
        progress.referring += 0.05 * (referring - progress.referring)

    def _advance(self) -> None:
        progress = self.progress
        ready = min(progress.direct, progress.referring) > self.config.advance_at
        last = progress.stage == len(self.config.curriculum) - 1
        if ready and not last and progress.step - progress.stage_step > 40:
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
        GenerationConfig(
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            do_sample=False,
            max_new_tokens=16,
        ).save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory)
        record = {"progress": asdict(self.progress), "config": asdict(self.config)}
        record["config"].pop("curriculum")
        (directory / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    def _weights(self) -> dict[str, Tensor]:
        """All weights and the probe's, once; the tied output layer is the embedding."""
        state = self.model.state_dict()
        state.pop("lm_head.weight")
        return {**state, "probe.weight": self.probe.weight.detach()}


def train(
    config: TrainingConfig,
    out: Path,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    minutes: float = math.inf,
    save_every: int = 200,
) -> Progress:
    """Train until the token budget or the time is used up, then write the model folder."""
    trainer = Trainer(config)
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
        "direct %.3f referring %.3f subject %.3f",
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
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(prog="python -m tests.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="folder for the model")
    parser.add_argument("--tokens", type=int, default=defaults.tokens, help="training tokens")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--checkpoint", type=Path, help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    config = replace(defaults, tokens=options.tokens, seed=options.seed)
    train(
        config,
        options.out,
        checkpoint=options.checkpoint,
        resume=options.resume,
        minutes=options.minutes,
    )


if __name__ == "__main__":
    main()
