"""A selector of your own: a class that scores tokens, and its line in the table of selectors.

Prints which tokens of a passage it has recomputed, and which the selector that it derives from.
"""

from __future__ import annotations

from torch import Tensor

from cacheblend_rag import BlendConfig, Document, Engine, Explanation, open_engine
from cacheblend_rag.blend.selectors import SELECTORS, Evidence, Question
from cacheblend_rag.settings.base import Positive


class Beginnings(Question):
    """The question's attention, weighted by how near a token is to the beginning of its chunk."""

    halved_after: Positive = 32
    """Number of tokens after which the weight is half."""

    def score(self, evidence: Evidence) -> Tensor:
        """Return (tokens,) float32 scores; the highest are recomputed."""
        return super().score(evidence) * 0.5 ** (evidence.offsets / self.halved_after)


SELECTORS["beginnings"] = Beginnings  # in the package: a line in blend/selectors/__init__.py


def recomputed(engine: Engine, prompt: str, selector: str) -> list[int]:
    """Return the tokens that are recomputed, counted from the beginning of their passage."""
    config = engine.config.with_changes(selector=selector, recompute_ratio=0.25)
    chunks = Explanation.of(engine.generate(prompt, config=config).report).chunks
    return [token.position - chunk.start for chunk in chunks for token in chunk.marked]


def main(model: str = "smollm2") -> None:
    """Compare both on a passage and a question."""
    passage = "Hapi was the god of the flood of the Nile. Sobek, the crocodile, guarded its banks."
    config = BlendConfig(min_tokens=0, cost_model=False, trace=True)
    engine = open_engine("transformers", model=model, config=config)
    engine.precompute([Document("gods", (passage,))])
    for selector in ("question_mid", "beginnings"):
        print(selector, recomputed(engine, f"{passage}\n\nWho was Hapi?", selector))
    engine.close()


if __name__ == "__main__":
    main()
