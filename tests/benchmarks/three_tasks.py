"""Asks three tasks over the same passages, as data sets for ``cacheblend-rag eval``.

``python -m tests.benchmarks.three_tasks --data FILE --out FOLDER`` writes ``question.json`` with a
file's own questions, ``summary.json``, which asks for a summary of all notes, and ``label.json``,
which asks whether the notes answer a question: their own, or another one. All three have the same
documents and retrieved passages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.quality.data.sentences import split_sentences
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.questions import DataChoice, choose_questions

TASKS = {
    "question": "Read the notes below and answer the question. Give a short answer.",
    "summary": "Read the notes below and sum up what they say, in one sentence.",
    "label": "Read the notes below and answer the question with yes or no.",
}
SUMMARY = "What do the notes say, in one sentence?"
SETTING = "adjacent"
SEED = 7


def three_tasks(data: EvalDataset) -> dict[str, EvalDataset]:
    """Return the data sets by task.

    A summary has no gold answer; the first sentence of the notes stands for one. Every second label
    is asked with the next question's text, which other documents answer. Raises DatasetError if
    there is no other question.
    """
    texts = [one.question for one in data.questions]
    if len(set(texts)) < 2:
        raise DatasetError("labels take at least two questions")
    tasks: dict[str, list[EvalQuestion]] = {name: [] for name in TASKS}
    for index, question in enumerate(data.questions):
        is_own = index % 2 == 0
        asked = texts[index] if is_own else texts[(index + 1) % len(texts)]
        label = f"Do the notes answer this question: {asked}"
        first = split_sentences(question.passages[0].text)[0]
        tasks["question"].append(question)
        tasks["summary"].append(replace(question, question=SUMMARY, answers=(first,)))
        answers = ("yes" if is_own else "no",)
        tasks["label"].append(replace(question, question=label, answers=answers))
    return {
        name: EvalDataset(name, tuple(questions), TASKS[name]) for name, questions in tasks.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.three_tasks")
    parser.add_argument("--data", required=True, help="a file of questions that `eval` reads")
    parser.add_argument("--out", type=Path, required=True, help="a folder, made if need be")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer counts")
    parser.add_argument("--chunk-tokens", type=int, default=150)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(2000, 2400))
    given = parser.parse_args(arguments)
    tokenizer = load_tokenizer(given.model)
    choice = DataChoice(
        given.chunk_tokens,
        tuple(given.prompt_tokens),
        count_tokens=lambda text: len(tokenizer.tokenize(text)),
    )
    data = choose_questions(given.data, [SETTING], given.questions, None, SEED, choice=choice)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, task in three_tasks(data).items():
        task.save(given.out / f"{name}.json")


if __name__ == "__main__":
    main()
