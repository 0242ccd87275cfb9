"""An attack like HijackKV's (arXiv 2607.19957) on chunk KV that knows its document.

With the lead-in ``document`` the KV of a passage depends on what stands before it. A stranger who
may store documents stores a passage of somebody else's document behind a prefix that was searched
for, so that questions over the passage get a wrong answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag import BlendConfig, Document, TransformersEngine
from cacheblend_rag.engines.transformers.given_model import GivenModel
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from cacheblend_rag.settings.options import DEFAULT_RATIO
from tests.benchmarks.command import run, say
from tests.benchmarks.hijack_passages import Attack, Passage, write_passages
from tests.benchmarks.hijack_search import PrefixSearch, printable_tokens

INSTRUCTION = "Answer the question from the passages below, in one short sentence."
ANSWER_TOKENS = 24


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
        scores = self.engine.score_each(
            prompt_over(self._prompt, attack),
            answers,
            config=self.engine.config.with_ratio(ratio),
            hints=hints,
            full=full,
        )
        wanted, right = (
            float(score.log_probs[range(len(ids)), ids].sum())
            for score, ids in zip(scores, answers, strict=True)
        )
        return wanted > right


def prompt_over(prompt: RagPrompt, passage: Passage) -> str:
    """Return the prompt with the passage and its question."""
    return prompt.render([Turn(passage.question, (passage.text,))])


def read_attacks(file: str | Path) -> list[Attack]:
    """Return what a search has found."""
    names = [one.name for one in fields(Attack)]
    found = json.loads(Path(file).read_text())
    return [Attack(**{name: each[name] for name in names}) for each in found]


def measure(
    *,
    model: str = DEFAULT_MODEL,
    out: str = "hijack.json",
    passages: int = 40,
    candidates: int = 8,
    steps: int = 30,
    minutes: float = 60.0,
    enough: float = 2.0,
    ratio: tuple[float, ...] = (0.0, DEFAULT_RATIO, 0.3),
    replay: str = "",
) -> dict[str, Any]:
    """Search prefixes that make a passage's KV tell a wrong answer, or try those of a file again.

    Passages are attacked a step each in turn; ``out`` has the best prefixes after every round, and
    after so many minutes no step begins. candidates: changes that are tried in a step. enough: how
    much likelier the wrong answer is, in nats, at the end. replay: a file of prefixes.
    """
    if replay:
        return replayed(model, replay, ratio)
    given = GivenModel.of(model, None, None, "float32")
    victim, tokenizer = given.model.eval().requires_grad_(False), given.tokenizer
    prompt, allowed = RagPrompt(tokenizer, INSTRUCTION), printable_tokens(victim, tokenizer)
    end, found, running = time.monotonic() + 60 * minutes, list[dict[str, Any]](), []
    for seed, attack in enumerate(_answered(victim, tokenizer, prompt, passages)):
        text = prompt_over(prompt, attack)
        one = PrefixSearch(
            victim, tokenizer, attack, text, allowed=allowed, candidates=candidates, seed=seed
        )
        found.append({**asdict(attack), "margin": -torch.inf})
        running.append((found[-1], one.steps()))
    for step in range(steps + 1):
        for entry, more in running:
            if entry["margin"] < enough and not (step and time.monotonic() > end):
                prefix, margin = next(more)
                entry |= {"prefix": prefix, "margin": round(margin, 2), "steps": step}
                entry.setdefault("plain_margin", entry["margin"])
                say(f"step {step}, margin {entry['margin']}: {prefix}")
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    return {"attacks": found}


def replayed(model: str, file: str, ratios: Sequence[float]) -> dict[str, Any]:
    """Return ``rows``: how many wrong answers are likelier than the right ones, by ratio.

    full: by ordinary prefill. absent: with the owners' documents alone. stored: with the strangers'
    too. hinted: with hints of the strangers' documents, so in any case with their KV.
    """
    attacks, victim = read_attacks(file), Victim(model)
    rows: list[dict[str, float]] = [{"ratio": ratio} for ratio in ratios]

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


def _answered(model: Any, tokenizer: Any, prompt: RagPrompt, count: int) -> Iterator[Attack]:
    """Yield passages whose question the model answers right, without a prefix."""
    for passage in write_passages():
        ids = tokenizer(prompt_over(prompt, passage), add_special_tokens=False, return_tensors="pt")
        told = model.generate(**ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
        answer = tokenizer.decode(told[ids["input_ids"].shape[1] :], skip_special_tokens=True)
        if passage.answer in answer and passage.target not in answer:
            yield Attack(**asdict(passage), told=answer.strip())
            count -= 1
        if not count:
            return


if __name__ == "__main__":
    run(measure)
