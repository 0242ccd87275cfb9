"""Draws training batches: prompts of the corpus, each with many questions, or repeated tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.demo.attention import HIDDEN, causal_bias
from tests.demo.curriculum import Stage
from tests.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID
from tests.toy import (
    BEGUN_FRAME,
    CHUNK_SEPARATOR,
    DEFAULT_FRAME,
    FIRST_NAMES,
    OTHER_FRAMES,
    UNKNOWN,
    CorpusShape,
    PromptFrame,
)
from tests.toy.settings import DRAWS, Draw

# What a position's next token is, for the loss and the accuracy.
OTHER, DIRECT, REFERRING, NAME, END = 0, 1, 2, 3, 4

# Settings whose prompts do not decide the answer.
UNDECIDED = {"fragments", "shuffled"}


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
    setting: str = ""

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


def draw_batch(
    rng: random.Random, stage: Stage, questions: int, tokenizer: PreTrainedTokenizerFast
) -> Batch:
    """As many prompts of one stage, in one setting and wording, as the batch has room for."""
    names, shares = zip(*stage.settings, strict=True)
    setting = rng.choices(names, shares)[0]
    frame, shape = DEFAULT_FRAME, stage.shape
    if rng.random() < stage.begun:
        frame, shape = BEGUN_FRAME, replace(shape, begun=True)
    elif rng.random() < stage.other_frames and setting != "turns":
        frame = rng.choice(OTHER_FRAMES)
    examples: list[_Example] = []
    context, question, count = 0, 0, 0
    while True:
        example = _draw_example(rng, setting, shape, frame, questions, tokenizer)
        context = max(context, len(example.context))
        question = max(question, *(len(q.ids) for q in example.questions))
        count = max(count, len(example.questions))
        padded = context + question * count
        if examples and padded * (len(examples) + 1) > stage.batch_tokens:
            break
        examples.append(example)
    separate = rng.random() < stage.separate and setting not in UNDECIDED
    return _collate(examples, setting, separate=separate)


def _draw_example(
    rng: random.Random,
    setting: str,
    shape: CorpusShape,
    frame: PromptFrame,
    questions: int,
    tokenizer: PreTrainedTokenizerFast,
) -> _Example:
    drawn = DRAWS[setting](rng, shape, False)
    if setting == "shuffled":
        rng.shuffle(drawn.retrieved)
    asked = [*drawn.questions, *drawn.others[: len(drawn.questions)]]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return cast(
            "list[list[int]]", tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        )

    context, owners = _encode_context(drawn, frame, encode)
    tails = encode([frame.tail.format(question=q.conversation) for q in asked])
    answers = encode([f" {q.answer}" for q in asked])
    names = set(tokenizer.convert_tokens_to_ids([f"Ġ{name}" for name in FIRST_NAMES]))
    subjects: dict[int, int] = {}
    encoded: list[_Question] = []
    for question, tail, answer in zip(asked, tails, answers, strict=True):
        kinds = [NAME if token in names else OTHER for token in tail]
        kinds[-1] = DIRECT if question.kind == "direct" else REFERRING
        subject = next(token for token in tail if token in names)
        if question.answer != UNKNOWN and setting not in UNDECIDED:
            value = context.index(answer[0], owners.index(question.document))
            subjects[value] = subject
        ends = [END] * len(answer)
        encoded.append(_Question(tail + answer, [*kinds, *ends], subject, len(tail) - 1))
    return _Example(context, owners, subjects, encoded[:questions])


def _encode_context(drawn: Draw, frame: PromptFrame, encode: Encode) -> tuple[list[int], list[int]]:
    """Token ids of everything before the tail, and the document that each belongs to."""
    pieces: list[tuple[str, int]] = [(frame.head, -1)]
    before = -1
    for document, chunk in drawn.retrieved:
        if before >= 0:
            pieces.append((CHUNK_SEPARATOR, document if document == before else -1))
        pieces.append((drawn.documents[document].chunks[chunk], document))
        before = document
    encoded = encode([text for text, _ in pieces])
    ids, owners = [BOS_ID], [-1]
    for (_, owner), tokens in zip(pieces, encoded, strict=True):
        ids += tokens
        owners += [owner] * len(tokens)
    return ids, owners


def _collate(examples: Sequence[_Example], setting: str, *, separate: bool) -> Batch:
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
    bias = causal_bias(context, torch.bfloat16)[None, None]
    if separate:
        bias = torch.where(_same_document(owners)[:, None], bias, HIDDEN)
    return Batch(
        ids,
        positions,
        targets,
        kinds,
        subjects,
        context,
        question,
        bias,
        padding,
        setting,
    )


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
        context_bias=causal_bias(length, torch.bfloat16)[None, None],
        padding_bias=torch.zeros(size[0], 1, 1, length, dtype=torch.bfloat16),
    )
