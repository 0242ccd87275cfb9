"""Explains how a prompt was served: the fate of each chunk and token, and a page that draws it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.printable import printable
from cacheblend_rag.report import PREFILL_PHASES, BlendReport, ChunkReport
from cacheblend_rag.trace import Trace, TracedTokens

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PreparedPrompt

BINS = 24
ROUNDING = 1e-9
"""Deviations below this share of the largest are rounding: the tokens did not change."""
ANSWER_TOKENS = 16
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100)
"""Round numbers between two ticks of the histogram's vertical axis."""


@dataclass(frozen=True)
class ExplainedToken:
    """A token of a chunk that was recomputed, or that might not be.

    Args:
        position: in the prompt.
        fate: ``recomputed`` (chosen by its score), ``all`` (everything was recomputed) or
            ``protected`` (it keeps what its own document told it).
        score: the selector's; None if it was not scored.
        rank: by score among all tokens that could be chosen, from 1; None without a score.
        deviation: squared difference of its fresh value from the cached one, in the first layer
            where that is recorded; None if it is in none.
    """

    position: int
    fate: Literal["recomputed", "all", "protected"]
    score: float | None = None
    rank: int | None = None
    deviation: float | None = None


@dataclass(frozen=True)
class ExplainedChunk(ChunkReport):
    """A chunk's report, and the fate of its tokens.

    Args:
        why: a sentence.
        marked: its tokens that were recomputed or protected, rising; empty without a trace.
    """

    why: str = ""
    marked: tuple[ExplainedToken, ...] = ()


@dataclass(frozen=True)
class Bin:
    """How many tokens have a deviation from ``low`` to ``high``.

    recomputed: of those that were recomputed in later layers, too. others: of those that were not.
    """

    low: float
    high: float
    recomputed: int
    others: int


@dataclass(frozen=True)
class Histogram:
    """How often deviations of values lie between two edges, on a logarithmic scale.

    Args:
        layer: where they were measured.
        bins: rising.
        zeros: tokens that did not change but for rounding.
    """

    layer: int
    bins: tuple[Bin, ...]
    zeros: int = 0

    @classmethod
    def of(cls, trace: Trace) -> Self | None:
        """Return the deviations of all candidates at the first check, or of recomputed tokens."""
        last = trace.selections[-1:]
        kept = {at for one in last for at, on in zip(one.positions, one.chosen, strict=True) if on}
        for choice in trace.selections:
            if choice.layer is not None and any(choice.value_deviations):
                return cls._binned(choice.layer, choice, kept)
        one = trace.tokens
        if one is None or one.layer is None or not any(one.value_deviations):
            return None
        return cls._binned(one.layer, one, set(one.positions))

    @classmethod
    def _binned(cls, layer: int, tokens: TracedTokens, kept: set[int]) -> Self:
        deviations = np.asarray(tokens.value_deviations)
        is_changed = deviations > deviations.max() * ROUNDING
        is_kept = np.array([at in kept for at in tokens.positions])
        changed = np.log10(deviations[is_changed])
        low, high = changed.min(), changed.max()
        edges = low + ((high - low) / BINS or 0.1) * np.arange(BINS + 1)
        edges[-1] = max(edges[-1], high)  # which rounding may have put below
        counts = (np.histogram(changed[of[is_changed]], edges)[0] for of in (is_kept, ~is_kept))
        powers = (10 ** np.minimum(edges, 308.0)).tolist()
        columns = (powers[:-1], powers[1:], *(one.tolist() for one in counts))
        bins = tuple(Bin(*row) for row in zip(*columns, strict=True))
        return cls(layer, bins, int((~is_changed).sum()))


@dataclass(frozen=True)
class Explanation:
    """What a report says, in sentences and numbers that can be drawn.

    Args:
        summary: what was reused, what it cost, what it saved, in one or two sentences.
        chunks: one for each chunk of the report.
        histogram: of deviations at the check layer, or the first layer whose values depend on
            other tokens; None without a trace of them.
        notes: what was done differently than asked or is missing, and why.
    """

    summary: str
    chunks: tuple[ExplainedChunk, ...]
    histogram: Histogram | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: BlendReport) -> Self:
        """Return the explanation of a request by its report.

        A report with a trace (``BlendConfig(trace=True)``) tells which tokens were recomputed.
        """
        trace = report.trace or Trace()
        marked = _marked(report, trace)
        chunks = []
        for chunk in report.chunks:
            here = range(chunk.start, chunk.start + chunk.tokens) if chunk.hit else range(0)
            own = tuple(marked[at] for at in here if at in marked)
            why = _why(chunk, report, own)
            chunks.append(ExplainedChunk(**vars(chunk), why=why, marked=own))
        return cls(_summary(report), tuple(chunks), Histogram.of(trace), tuple(_notes(report)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; each chunk with the code of its reason."""
        plain = asdict(self)
        for told, chunk in zip(plain["chunks"], self.chunks, strict=True):
            told["reason_code"] = chunk.reason_code
        return plain


def _summary(report: BlendReport) -> str:
    tokens, first = f"{report.prompt_tokens:,} tokens", report.seconds.time_to_first_token
    if not report.blended:
        why = f": {report.reason}" if report.reason else ""
        return f"Ordinary prefill computed {tokens}{why}. First token after {first:.3f} s."
    return (
        f"Of {tokens}, {report.reused_tokens:,} were reused as stored, "
        f"{report.recomputed_tokens:,} recomputed ({report.selector}, ratio "
        f"{report.recompute_ratio:g}) and {report.computed_tokens:,} computed: "
        f"{100 * report.compute_share:.1f} % of full prefill's work. "
        f"First token after {first:.3f} s."
    )


def _notes(report: BlendReport) -> Iterator[str]:
    yield from map(str, filter(None, (report.selector_reason, report.ratio_reason)))
    if not report.blended:
        return
    if report.trace is None:
        yield "the report holds no trace: ask with BlendConfig(trace=True)"
    elif report.trace.truncated:
        yield "the trace is cut: it holds the tokens with the highest scores only"
    elif not report.trace.selections and report.recomputed_tokens:
        yield "every token was recomputed, so none was chosen by a score"


def _why(chunk: ChunkReport, report: BlendReport, own: Sequence[ExplainedToken]) -> str:
    edges = f"{_counted(chunk.edge_tokens)} at its edges joined with the text beside it, computed"
    told = chunk.altered or (edges if chunk.edge_tokens else "")
    edge = told and f"; {told}"
    if not chunk.hit:
        where = f" ({chunk.tier})" if chunk.tier else ""
        return f"computed: {chunk.reason or 'no reason given'}{where}{edge}"
    recomputed = _counted(chunk.recomputed) if chunk.recomputed else "nothing"
    parts = [f"reused from {chunk.tier or 'memory'}", f"{recomputed} recomputed"]
    ranks = [token.rank for token in own if token.rank is not None and token.fate == "recomputed"]
    if ranks:
        parts[1] += f" by {report.selector}, ranks {min(ranks):,} to {max(ranks):,}"
    protected = sum(token.fate == "protected" for token in own)
    if protected:
        parts.append(f"{_counted(protected)} protected, since fresh KV would forget its document")
    return ", ".join(parts) + edge


def _counted(tokens: int) -> str:
    return f"{tokens:,} token" + ("" if tokens == 1 else "s")


def _marked(report: BlendReport, trace: Trace) -> Mapping[int, ExplainedToken]:
    """Return the recomputed and the protected tokens of reused chunks, by position."""
    found = {at: ExplainedToken(at, "protected") for at in trace.protected}
    deviations: dict[int, float] = {}
    for one in (trace.tokens, *reversed(trace.selections)):  # of the first choice that has them
        if one is not None and one.value_deviations:
            deviations |= zip(one.positions, one.value_deviations, strict=True)
    if trace.selections:
        last = trace.selections[-1]
        scored = zip(last.scores, last.positions, strict=True)
        order = sorted(scored, key=lambda pair: (-pair[0], pair[1]))
        ranks = {position: rank for rank, (_, position) in enumerate(order, start=1)}
        for at, score, is_chosen in zip(last.positions, last.scores, last.chosen, strict=True):
            if is_chosen:
                found[at] = ExplainedToken(at, "recomputed", score, ranks[at], deviations.get(at))
    elif report.recomputed_tokens:
        whole = (one for one in report.chunks if one.hit and one.recomputed == one.tokens)
        for chunk in whole:
            for at in range(chunk.start, chunk.start + chunk.tokens):
                found[at] = ExplainedToken(at, "all", deviation=deviations.get(at))
    return found


@dataclass(frozen=True)
class Explained:
    """A served prompt, explained.

    report: of the request. tokens: the text of each token of the prompt, in order; empty if it is
    not known. answer: the text that was generated.
    """

    report: BlendReport
    tokens: tuple[str, ...] = ()
    answer: str = ""

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
        }


def explain_prompt(engine: Engine, prompt: Any) -> Explained:
    """Answer a prompt with a trace, and return what explains it; raises what generate does."""
    prepared, config = engine.prepare(prompt), engine.config.with_changes(trace=True)
    greedy = SamplingParams.greedy(max_tokens=ANSWER_TOKENS)
    answer = engine.generate(prepared, greedy, config=config)
    return Explained(answer.report, token_texts(engine.tokenizer, prepared), answer.text)


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


class Bar(NamedTuple):
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


class Passage(NamedTuple):
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
