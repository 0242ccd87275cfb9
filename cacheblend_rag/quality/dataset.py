"""Questions with gold answers and retrieved passages, their prompts, and the project's own format.

`EvalDataset.save` writes it, ``quality.questions`` reads it and other data sets' files::

    {"format": "cacheblend-rag/eval", "version": 1, "name": str, "instruction": str,
     "questions": [{"question": str, "answers": [str, ...], "setting": str,
                    "documents": [{"id": str, "separator": str, "chunks": [str, ...]}, ...],
                    "passages": [[document, chunk], ...], "gold": [[document, chunk], ...],
                    "question_first": bool}, ...]}

where ``passages`` names the retrieved chunks by index, in prompt order, and ``gold`` those that
hold the answer. The whole documents beside the retrieved chunks allow the lead-in ``document``.
``setting`` is a label that results are grouped by; ``name``, ``instruction``, ``setting``,
``separator``, ``gold`` and ``question_first`` are optional.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend_rag.quality.measure import Prompt
from cacheblend_rag.text.chat import InstructedChat
from cacheblend_rag.text.chunk import SEPARATOR, Chunk, Document
from cacheblend_rag.text.prompt import BlendPrompt

FORMAT = "cacheblend-rag/eval"
VERSION = 1
DEFAULT_INSTRUCTION = "Read the notes below and answer the question. Give a short answer."
DEFAULT_SETTING = "retrieved"
ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class EvalQuestion:
    """One question over retrieved passages.

    answers: gold answers, at least one. passages: the retrieved chunks in prompt order.
    documents: the documents to index; every passage is a chunk of one. setting: a label.
    gold: the chunks that hold the answer, as far as the data tells; empty if it does not.
    question_first: whether the question stands before the passages, as where tools return them.
    """

    question: str
    answers: tuple[str, ...]
    passages: tuple[Chunk, ...]
    documents: tuple[Document, ...]
    setting: str = DEFAULT_SETTING
    gold: tuple[Chunk, ...] = ()
    question_first: bool = False


@dataclass(frozen=True)
class EvalDataset:
    """Questions under one instruction; ``name`` identifies the dataset in results."""

    name: str
    questions: tuple[EvalQuestion, ...]
    instruction: str = DEFAULT_INSTRUCTION

    @property
    def settings(self) -> tuple[str, ...]:
        """The questions' settings, in order of appearance."""
        return tuple(dict.fromkeys(question.setting for question in self.questions))

    def of_setting(self, setting: str) -> tuple[EvalQuestion, ...]:
        """Return the questions of one setting, in order."""
        return tuple(q for q in self.questions if q.setting == setting)

    def save(self, path: Path) -> None:
        """Write the documents format (see the module's docstring)."""
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "instruction": self.instruction,
            "questions": [_question_to_json(question) for question in self.questions],
        }
        path.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class PromptFrame:
    """What surrounds passages and questions in all prompts of an evaluation.

    opening: the text before the first passage, which an engine gets as its ``instruction``.
    closing: the text behind the question. is_rendered: whether a chat template rendered both, so
    that the tokenizer adds no BOS.
    """

    opening: str
    closing: str = ANSWER
    is_rendered: bool = False

    @classmethod
    def of(cls, tokenizer: Any, instruction: str, *, chat_template: bool = True) -> PromptFrame:
        """Return the frame that ``ask`` uses: by the model's chat template, if it has one.

        chat_template: False gives plain text. Raises ConfigError when the template drops the user's
        text.
        """
        chat = InstructedChat(tokenizer, instruction, chat_template=chat_template)
        return cls(chat.lead_in, f"{ANSWER}{chat.closing}", chat.has_template)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer: without a chat template, the end of its line."""
        return () if self.is_rendered else ("\n",)

    def prompt(self, question: EvalQuestion, *, bare: bool = False) -> BlendPrompt:
        """Return opening, passages and question as explicit segments; bare: without passages."""
        passages = () if bare else question.passages
        between = [part for passage in passages for part in (passage, SEPARATOR)]
        asked = f"Question: {question.question}"
        if question.question_first:
            parts = (self.opening, f"{asked}{SEPARATOR}", *between, self.closing.lstrip("\n"))
        else:
            parts = (self.opening, *between, f"{asked}{self.closing}")
        prompt = BlendPrompt.of(*(part for part in parts if part != ""))
        return replace(prompt, is_rendered=self.is_rendered)

    def to_measure(self, question: EvalQuestion) -> Prompt:
        """Return a question as a prompt to be measured, with its documents and gold answers."""
        return Prompt(
            asked=self.prompt(question),
            documents=question.documents,
            golds=question.answers,
            bare=self.prompt(question, bare=True),
            name=f"question {question.question!r}",
        )


def _question_to_json(question: EvalQuestion) -> dict[str, Any]:
    places = {
        chunk: [d, c]
        for d, document in enumerate(question.documents)
        for c, chunk in enumerate(document.to_chunks())
    }
    return {
        "question": question.question,
        "answers": list(question.answers),
        "setting": question.setting,
        "documents": [
            {"id": d.document_id, "separator": d.separator, "chunks": list(d.chunks)}
            for d in question.documents
        ],
        "passages": [places[passage] for passage in question.passages],
        **({"gold": [places[chunk] for chunk in question.gold]} if question.gold else {}),
        **({"question_first": True} if question.question_first else {}),
    }
