"""An attack like HijackKV's (arXiv 2607.19957) on chunk KV that knows its document.

With the lead-in ``document`` the KV of a passage depends on what stands before it. A stranger who
may store documents stores a passage of somebody else's document behind a prefix that was searched
for, so that questions over the passage get a wrong answer. The files beside this one hold prefixes
that a search has found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cacheblend_rag import BlendConfig, Document, SamplingParams, TransformersEngine
from cacheblend_rag.engines.transformers.loading import GivenModel
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from cacheblend_rag.settings.options import DEFAULT_RATIO
from tests.benchmarks.command import run, say

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

    def __init__(self, model: str = DEFAULT_MODEL) -> None:
        given = GivenModel.of(model, None, None, "float32")
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

    def fooled(
        self, attacks: Iterable[Attack], ratio: float = DEFAULT_RATIO, *,
        hint: Callable[[Attack], str] | None = None, full: bool = False,
    ) -> int:  # fmt: skip
        """Ask over each passage; return how often the wrong answer is likelier than the right one.

        hint: the document to name for an attack. full: by ordinary prefill.
        """
        return sum(self._is_fooled(a, ratio, [hint(a)] if hint else [], full) for a in attacks)

    def _is_fooled(self, attack: Attack, ratio: float, hints: list[str], full: bool) -> bool:
        encode = self.engine.tokenizer.encode
        answers = [encode(answer, add_special_tokens=False) for answer in attack.answers]
        _, scores = self.engine.generate_and_score(
            self._prompt.render([Turn.of(attack.question, (attack.text,))]),
            SamplingParams.greedy(max_tokens=1),
            lambda _: answers,
            config=self.engine.config.with_ratio(ratio),
            hints=hints,
            full=full,
        )
        wanted, right = (
            float(score.log_probs[range(len(ids)), ids].sum())
            for score, ids in zip(scores, answers, strict=True)
        )
        return wanted > right


def read_attacks(file: str | Path) -> list[Attack]:
    """Return what a search has found."""
    names = [one.name for one in fields(Attack)]
    found = json.loads(Path(file).read_text())
    return [Attack(**{name: each[name] for name in names}) for each in found]


def measure(
    *,
    model: str = DEFAULT_MODEL,
    replay: str = str(FOUND),
    ratio: tuple[float, ...] = (0.0, DEFAULT_RATIO, 0.3),
) -> dict[str, Any]:
    """Return ``rows``: how many wrong answers are likelier than the right ones, by ratio.

    replay: a file of prefixes. full: by ordinary prefill. absent: with the owners' documents alone.
    stored: with the strangers' too. hinted: with hints of the strangers' documents, so in any case
    with their KV.
    """
    attacks, victim = read_attacks(replay), Victim(model)
    rows: list[dict[str, float]] = [{"ratio": one} for one in ratio]

    def count(name: str, hint: Callable[[Attack], str] | None = None) -> None:
        for row in rows:
            say(f"{name}, ratio {row['ratio']}")
            row[name] = victim.fooled(attacks, row["ratio"], hint=hint)

    with closing(victim.engine):
        full = victim.fooled(attacks, full=True)
        victim.store(attack.manual for attack in attacks)
        count("absent")
        victim.store(attack.upload for attack in attacks)
        count("stored")
        count("hinted", lambda attack: attack.upload.document_id)
    return {"attacks": len(attacks), "rows": [{**row, "full": full} for row in rows]}


if __name__ == "__main__":
    run(measure)
