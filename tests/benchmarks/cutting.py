"""Cuts the documents of questions into chunks, as whole documents, fragments and shuffled.

``python -m tests.benchmarks.cutting --source musique.jsonl --out questions.json`` writes questions
for `eval`, each in three settings over the same documents: ``adjacent`` has all chunks in order,
``shuffled`` in random order, ``fragments`` some chunks of each document, those with the answer
always, but not its first one, which tells what the document is about.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path

import typer

from cacheblend_rag import load_tokenizer
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.questions import load_dataset
from cacheblend_rag.quality.scores import holds_answer
from cacheblend_rag.text.chunk import Chunk, Document

ADJACENT, FRAGMENTS, SHUFFLED = SETTINGS = ("adjacent", "fragments", "shuffled")
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]\u201d\u2019]))\s+(?=[^a-z\s])|\n\s*\n")
CountTokens = Callable[[str], int]


def main(
    *,
    source: str = "questions.json",
    out: str = "cut.json",
    model: str = "smollm2",
    questions: int = 40,
    chunk_tokens: int = 150,
    prompt_tokens: int = 0,
) -> None:
    """Write questions with cut documents; print how many there are in each setting.

    source: a file that `eval` reads. model: its tokenizer counts tokens. questions: most a setting.
    chunk_tokens: about how many a chunk has; chunks end with sentences. prompt_tokens: other
    questions' documents, which do not hold the answer, are added until there are so many.
    """
    data, tokenizer = load_dataset(Path(source)), load_tokenizer(model)
    cut = cut_dataset(data, chunk_tokens, prompt_tokens, lambda text: len(tokenizer.tokenize(text)))
    found = tuple(chain(*(cut.of_setting(setting)[:questions] for setting in SETTINGS)))
    replace(cut, questions=found).save(Path(out))
    told = {setting: sum(one.setting == setting for one in found) for setting in SETTINGS}
    print(json.dumps(told))


def cut_dataset(
    data: EvalDataset, chunk_tokens: int, prompt_tokens: int, count_tokens: CountTokens
) -> EvalDataset:
    """Return questions over cut documents, in three settings; arguments as above.

    A question whose answer stands in first chunks alone has no fragments.
    """
    texts = list(dict.fromkeys(_text(one) for asked in data.questions for one in asked.documents))
    found = []
    for index, question in enumerate(data.questions):
        own = [_text(document) for document in question.documents]
        named = {chunk.document_id for chunk in question.gold}
        golden = [
            text
            for text, one in zip(own, question.documents, strict=True)
            if not named or one.document_id in named
        ]
        rng, total = random.Random(index), sum(map(count_tokens, own)) if prompt_tokens else 0
        for text in rng.sample(texts, len(texts)):
            if total >= prompt_tokens:
                break
            if text not in own and not holds_answer(text, question.answers):
                own.append(text)
                total += count_tokens(text)
        if prompt_tokens:
            rng.shuffle(own)
        documents = tuple(
            Document(f"{index}-{place}", cut_text(text, chunk_tokens, count_tokens))
            for place, text in enumerate(own)
        )
        gold: list[Chunk] = []
        for document in (one for one, text in zip(documents, own, strict=True) if text in golden):
            chunks = document.to_chunks()
            held = [chunk for chunk in chunks if holds_answer(chunk.text, question.answers)]
            gold += held or (chunks if named else [])
        whole = replace(question, documents=documents, gold=tuple(gold))
        found += [asked for one in SETTINGS if (asked := _retrieved(whole, one, index))]
    return replace(data, questions=tuple(found))


def _retrieved(question: EvalQuestion, setting: str, index: int) -> EvalQuestion | None:
    """Return a question over what a setting retrieves; None if that does not hold the answer."""
    rng = random.Random(f"{index} {setting}")
    chunks = [document.to_chunks() for document in question.documents]
    passages = list(chain(*chunks))
    if setting == SHUFFLED:
        rng.shuffle(passages)
    if setting == FRAGMENTS:
        later = [own[1:] or own for own in chunks]
        kept = set(question.gold)
        kept.update(*(rng.sample(own, rng.randint(1, len(own))) for own in later))
        passages = [chunk for chunk in chain(*later) if chunk in kept]
        told = [one for one in question.gold if holds_answer(one.text, question.answers)]
        if not any(chunk in passages for chunk in told or question.gold):
            return None
    return replace(question, passages=tuple(passages), setting=setting)


def _text(document: Document) -> str:
    return document.separator.join(document.chunks)


def cut_text(text: str, chunk_tokens: int, count_tokens: CountTokens) -> tuple[str, ...]:
    """Return the text in chunks that end with sentences, as equal in length as these allow."""
    sentences: Sequence[str] = [one.strip() for one in SENTENCE_END.split(text) if one.strip()]
    lengths = [count_tokens(sentence) for sentence in sentences]
    total = sum(lengths)
    count = max(1, round(total / chunk_tokens))
    chunks: list[list[str]] = [[] for _ in range(count)]
    for sentence, length, end in zip(sentences, lengths, accumulate(lengths), strict=True):
        chunks[int((end - length / 2) * count / total)].append(sentence)
    return tuple(" ".join(chunk) for chunk in chunks if chunk) or (text,)


if __name__ == "__main__":
    typer.run(main)
