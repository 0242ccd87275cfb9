"""Time to first token of questions over the same passages: in full, blended, as an exact prefix."""

from __future__ import annotations

import time
from contextlib import closing
from statistics import median
from typing import Any

from cacheblend_rag import Document, SamplingParams, open_engine
from cacheblend_rag.demo.passages import load_passages
from tests.benchmarks.command import run

PASSAGES = 4
ONE = SamplingParams(max_tokens=1)


def measure(
    *,
    model: str = "smollm2",
    engine: str = "transformers",
    questions: int = 8,
    words: int = 190,
    wait: float = 60.0,
) -> dict[str, Any]:
    """Return the median seconds of each way, and how many prompts were an exact prefix.

    engine: ``transformers`` or ``vllm``. words: of a passage. wait: seconds of idle time after the
    second question.
    """
    instruction = "Answer from the passages.\n\n"
    text = " ".join(passage.text for passage in load_passages().passages).split()
    passages = [" ".join(text[at * words : (at + 1) * words]) for at in range(PASSAGES)]
    seconds: dict[str, list[float]] = {"full": [], "blended": [], "exact": []}
    exact = 0
    asked = open_engine(
        engine, model=model, dtype="float32", instruction=instruction, fill_on_miss=True
    )
    with closing(asked):
        asked.precompute([Document(str(at), (one,)) for at, one in enumerate(passages)])
        blended = asked.config.with_changes(reuse_prefix=False)
        beginning = instruction + "\n\n".join(passages)
        for number in range(questions + 2):
            prompt = f"{beginning}\n\nQuestion {number}: Who is named?\nAnswer:"
            again = asked.generate(prompt, ONE)  # the first two are blended, too
            told = (
                asked.generate_full(prompt, ONE),
                asked.generate(prompt, ONE, config=blended),
                again,
            )
            for way, answer in zip(seconds.values(), told, strict=True):
                way.append(answer.report.seconds.time_to_first_token)
            exact += {chunk.tier for chunk in again.report.chunks} == {"prefix cache"}
            time.sleep(wait if number == 1 else 0)
    return {"exact": exact} | {f"{way}_seconds": median(s[2:]) for way, s in seconds.items()}


if __name__ == "__main__":
    run(measure)
