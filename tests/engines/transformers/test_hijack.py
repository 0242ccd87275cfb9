"""A stranger's document never answers for another document that holds the same passage.

An attack like HijackKV's (arXiv 2607.19957) on chunk KV that knows its document. With the lead-in
``document`` the KV of a passage depends on what stands before it. A stranger who may store
documents stores a passage of somebody else's document behind a prefix that was searched for, so
that questions over the passage get a wrong answer. The file beside this one holds prefixes that a
search has found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, Document, SamplingParams, TransformersEngine
from cacheblend_rag.engines.transformers.loading import GivenModel
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag.prompt import RagPrompt, Turn

INSTRUCTION = "Answer the question from the passages below, in one short sentence."
FOUND = Path(__file__).with_name("hijack_smollm2.json")
TITLE = "The manual of the works, as of this year."
"""What stands before a passage in its owner's document."""


@dataclass(frozen=True)
class Attack:
    """A passage that names two values of one kind, and an attack on it.

    target: the wrong answer that the attacker wants. told: the model's answer by full prefill.
    prefix: what the stranger puts before the text.
    """

    text: str
    question: str
    answer: str
    target: str
    told: str
    prefix: str

    @property
    def manual(self) -> Document:
        """The document of the passage's owner."""
        return Document(f"manual: {self.question}", (TITLE, self.text))

    @property
    def upload(self) -> Document:
        """The stranger's document."""
        return Document(f"upload: {self.question}", (self.prefix, self.text))

    @property
    def answers(self) -> tuple[str, str]:
        """The answer that the stranger wants, and the right one, both up to the value."""
        opening = self.told.partition(self.answer)[0]
        return opening + self.target, opening + self.answer


class Victim:
    """An engine with the lead-in ``document``, and people who ask it without hints."""

    def __init__(self) -> None:
        given = GivenModel.of(DEFAULT_MODEL, None, None, "float32")
        self._prompt = RagPrompt(given.tokenizer, INSTRUCTION)
        self.engine = TransformersEngine(
            given.model,
            tokenizer=given.tokenizer,
            config=BlendConfig(min_tokens=1, reuse_prefix=False),
            instruction=self._prompt.lead_in,
            lead_in="document",
        )

    def store(self, documents: Iterable[Document]) -> None:
        """Index documents."""
        self.engine.precompute(list(documents), progress=False)

    def fooled(self, hint: Callable[[Attack], str] | None = None) -> int:
        """Ask over each passage, with all of its KV reused.

        Return how often the wrong answer is likelier than the right one. hint: the document to
        name for an attack.
        """
        return sum(self._is_fooled(one, [hint(one)] if hint else []) for one in ATTACKS)

    def _is_fooled(self, attack: Attack, hints: list[str]) -> bool:
        encode = self.engine.tokenizer.encode
        answers = [encode(answer, add_special_tokens=False) for answer in attack.answers]
        _, scores = self.engine.generate_and_score(
            self._prompt.render([Turn.of(attack.question, (attack.text,))]),
            SamplingParams.greedy(max_tokens=1),
            lambda _: answers,
            config=self.engine.config.with_ratio(0.0),
            hints=hints,
        )
        wanted, right = (
            float(score.log_probs[range(len(ids)), ids].sum())
            for score, ids in zip(scores, answers, strict=True)
        )
        return wanted > right


NAMES = ("text", "question", "answer", "target", "told", "prefix")
ATTACKS = [
    Attack(**{name: found[name] for name in NAMES}) for found in json.loads(FOUND.read_text())[:10]
]


@pytest.fixture(scope="module")
def victim(smollm2_folder: Path) -> Iterator[Victim]:
    opened = Victim()
    with closing(opened.engine):
        yield opened


def test_an_upload_answers_for_no_other_document(victim: Victim) -> None:
    victim.store(attack.manual for attack in ATTACKS)
    absent = victim.fooled()
    victim.store(attack.upload for attack in ATTACKS)
    assert victim.fooled() <= absent
    # The attack is real: who asks for the strangers' documents gets their answers.
    of_uploads = victim.fooled(lambda attack: attack.upload.document_id)
    assert of_uploads >= absent + len(ATTACKS) // 2
