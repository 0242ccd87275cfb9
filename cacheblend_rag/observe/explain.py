"""Answers a prompt with a trace, and explains on one page how it was served."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.observe.explanation import ExplainedChunk, ExplainedToken, Explanation
from cacheblend_rag.printable import printable
from cacheblend_rag.report import PREFILL_PHASES, BlendReport

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PreparedPrompt
    from cacheblend_rag.settings import BlendConfig

ANSWER_TOKENS = 16
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100)
"""Round numbers between two ticks of the histogram's vertical axis."""


@dataclass(frozen=True)
class Cost:
    """What a blend cost and saved, against full prefill of the same prompt.

    blend_seconds, full_seconds: times to first token, of requests without a trace. divergence: of
    the blend's predictions from full prefill's, along full prefill's answer, in nats per token;
    None if it could not be measured.
    """

    blend_seconds: float
    full_seconds: float
    divergence: float | None

    @property
    def speedup(self) -> float:
        """How many times sooner the blend's first token came."""
        return self.full_seconds / self.blend_seconds if self.blend_seconds > 0 else 0.0


@dataclass(frozen=True)
class Explained:
    """A served prompt, explained.

    report: of the request. tokens: the text of each token of the prompt, in order; empty if it is
    not known. answer: the text that was generated. cost: the comparison with full prefill, if it
    was asked for.
    """

    report: BlendReport
    tokens: tuple[str, ...] = ()
    answer: str = ""
    cost: Cost | None = None

    @property
    def explanation(self) -> Explanation:
        """The report's explanation."""
        return Explanation.of(self.report)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "report": self.report.to_dict(),
            "explanation": self.explanation.to_dict(),
            "tokens": list(self.tokens),
            "answer": self.answer,
            "cost": None if self.cost is None else asdict(self.cost),
        }


def explain_prompt(
    engine: Engine, prompt: Any, *, config: BlendConfig | None = None, compare: bool = False
) -> Explained:
    """Answer a prompt with a trace, and return what explains it.

    compare: whether it is answered by full prefill, too. The traced request comes first, so that it
    finds the store as it is; it is not the one that is timed. Raises what ``Engine.generate`` does.
    """
    config, prepared = config or engine.config, engine.prepare(prompt)
    greedy = SamplingParams.greedy(max_tokens=ANSWER_TOKENS)
    answer = engine.generate(prepared, greedy, config=config.with_changes(trace=True))
    cost = _cost(engine, prepared, config) if compare else None
    return Explained(answer.report, token_texts(engine.tokenizer, prepared), answer.text, cost)


def _cost(engine: Engine, prompt: PreparedPrompt, config: BlendConfig) -> Cost:
    from cacheblend_rag.quality.measure import FULL, Prompt, Rule, measure

    # Full prefill uses no cached prefix, so the blend that is compared with it does not either.
    rules = [FULL, Rule("blend", config.with_changes(reuse_prefix=False))]
    ((full, blend),) = (
        found.values() for found in measure(engine, [Prompt(prompt, name="")], rules)
    )
    compared = None if blend.record.not_blended else blend.record.fidelity
    divergence = None if compared is None else compared.kl
    return Cost(blend.record.ttft_seconds, full.record.ttft_seconds, divergence)


def token_texts(tokenizer: Any, prompt: PreparedPrompt) -> tuple[str, ...]:
    """Return the text of each token of a prompt; joined they are the prompt, if that can be told.

    Tokenizers that tell no offsets, or other tokens for the whole text, have each token decoded.
    """
    ids = list(prompt.token_ids)
    try:
        for special in (False, True):
            found = tokenizer(prompt.text, add_special_tokens=special, return_offsets_mapping=True)
            if list(found["input_ids"]) == ids:
                return _cut(prompt.text, found["offset_mapping"])
    except (NotImplementedError, TypeError, ValueError, KeyError):
        pass  # a tokenizer without offsets
    return tuple(tokenizer.decode([one]) for one in ids)


def _cut(text: str, offsets: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Return the text from each token's begin to the next one's; a special token has none."""
    texts, done = [], 0
    for start, end in offsets:
        texts.append(text[done : max(done, end)] if end > start else "")
        done = max(done, end)
    return tuple(texts)


@dataclass(frozen=True)
class Bar:
    """A phase before the first token; left, width: in percent of the time to it."""

    phase: str
    start: float
    seconds: float
    left: float
    width: float


def waterfall(report: BlendReport) -> list[Bar]:
    """Return the phases before the first token that took time, in their order."""
    phases = [
        (name, getattr(report.starts, name) or 0.0, getattr(report.seconds, name))
        for name in PREFILL_PHASES
    ]
    ends = (start + seconds for _, start, seconds in phases)
    whole = max(report.seconds.time_to_first_token, *ends) or 1.0
    return [
        Bar(name, start, seconds, 100 * start / whole, 100 * seconds / whole)
        for name, start, seconds in phases
        if seconds > 0
    ]


@dataclass(frozen=True)
class Passage:
    """A part of the prompt: a chunk, or the text between chunks (``chunk`` is None).

    tokens: the text of each, and what became of it if it was recomputed or protected.
    """

    tokens: Sequence[tuple[str, ExplainedToken | None]]
    chunk: ExplainedChunk | None = None
    number: int = 0


def passages(found: Explained) -> Iterator[Passage]:
    """Yield the prompt in parts, in order."""
    chunks = [one for one in found.explanation.chunks if one.start >= 0 and one.tokens]
    marked = {one.position: one for chunk in chunks for one in chunk.marked}
    tokens = [(printable(text), marked.get(at)) for at, text in enumerate(found.tokens)]
    done = 0
    for number, chunk in enumerate(sorted(chunks, key=lambda one: one.start), start=1):
        if done < chunk.start:
            yield Passage(tokens[done : chunk.start])
        end = chunk.start + chunk.tokens
        yield Passage(tokens[max(done, chunk.start) : end], chunk, number)
        done = max(done, end)
    if done < len(tokens):
        yield Passage(tokens[done:])


def explain_page(found: Explained, title: str = "cacheblend-rag explain") -> str:
    """Return one HTML page that needs no script and no network."""
    told = found.explanation
    bins = [] if told.histogram is None else told.histogram.bins
    ranks = (one.rank or 0 for chunk in told.chunks for one in chunk.marked)
    page: str = _template().render(
        title=printable(title),
        found=found,
        told=told,
        bars=waterfall(found.report),
        passages=list(passages(found)) if found.tokens else [],
        top=_round_above(max((one.recomputed + one.others for one in bins), default=0)),
        last_rank=max(ranks, default=0) or 1,
    )
    return page


def _round_above(most: int) -> int:
    """Return a plot's upper bound: at least ``most``, and a round number in each quarter."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(most, 1) / 4)) - 1)
    return next(4 * unit * step for step in STEPS if 4 * unit * step >= most)


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["ms"] = lambda seconds: f"{1000 * seconds:,.1f} ms"
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["short"] = lambda number: f"{number:.2g}"
    environment.filters["clean"] = lambda text: printable(str(text))
    return environment.from_string(Path(__file__).with_name("explain.html").read_text("utf-8"))
