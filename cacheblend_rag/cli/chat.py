"""``cacheblend-rag chat``: questions and answers over a collection, line by line.

Each question retrieves passages of its own. Earlier turns stay in the prompt with theirs, whose
stored KV is reused where they stand, until the context window is full: then the oldest turns go.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.rag.answering import AskedTurn, Asker, FittedPrompt, clean_question, finished
from cacheblend_rag.rag.collection import DEFAULT_FOLDER
from cacheblend_rag.rag.ordering import PassageOrder

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Generation, SamplingParams

INPUT_PROMPT = "> "
COMMANDS = "/sources, /report, /reset, /exit"


def chat_command(
    *,
    folder: asking.FromOption = DEFAULT_FOLDER,
    top_k: asking.TopKOption = asking.TOP_K,
    max_tokens: asking.MaxTokensOption = asking.MAX_TOKENS,
    temperature: asking.TemperatureOption = 0.0,
    ratio: asking.RatioOption = None,
    selector: asking.SelectorOption = None,
    order: asking.OrderOption = PassageOrder.SCORE,
    engine: options.EngineOption = None,
    device: options.DeviceOption = None,
) -> None:
    """Talk with a collection: a question a line, from the terminal or a pipe.

    /sources and /report tell of the last answer, /reset forgets all turns, /exit or the end of
    input ends. Ctrl-C stops an answer.
    """
    with asking.opened(folder, device, engine, ratio, selector) as asker:
        chat = _Chat(asker, asker.sampling(max_tokens, temperature), top_k, order)
        for line in _lines():
            if line == "/exit":
                return
            try:
                chat.take(line)
            except CacheBlendError as error:
                output.warn(str(error))


class _Chat:
    """The turns so far, and what became of the last one."""

    def __init__(
        self, asker: Asker, sampling: SamplingParams, top_k: int, order: PassageOrder
    ) -> None:
        self._asker = asker
        self._sampling = sampling
        self._top_k = top_k
        self._order = order
        self._turns: tuple[AskedTurn, ...] = ()
        self._last: tuple[FittedPrompt, Generation] | None = None

    def take(self, line: str) -> None:
        """Do what a line says: a command or a question."""
        if not line.startswith("/"):
            self._ask(clean_question(line))
        elif line == "/reset":
            self._turns, self._last = (), None
        elif line not in {"/sources", "/report"}:
            output.warn(f"{line} is no command: {COMMANDS}")
        elif self._last is None:
            output.warn("nothing was asked yet")
        elif line == "/sources":
            asking.print_sources(self._last[0].sources)
        else:
            asking.print_report(self._last[1].report)

    def _ask(self, question: str) -> None:
        with _ctrl_c_sets_event() as cancel:
            sources = self._asker.retrieve(question, self._top_k, self._order)
            fitted = self._asker.fit(self._turns, question, sources, self._sampling.max_tokens)
            deltas = self._asker.stream(fitted, self._sampling, cancel)
            answer = finished(asking.written(deltas))
        self._last = fitted, answer
        self._keep(fitted, answer.text.strip())
        _remark(fitted, answer)

    def _keep(self, fitted: FittedPrompt, text: str) -> None:
        """Remember the turn if it was answered, and forget those that found no room beside it."""
        *earlier, asked = fitted.turns
        answered = AskedTurn(replace(asked.turn, answer=text), asked.sources)
        self._turns = (*earlier, answered) if text else tuple(earlier)


def _remark(fitted: FittedPrompt, answer: Generation) -> None:
    """Print one line on stderr about an answer."""
    report = answer.report
    parts = [
        f"{len(fitted.sources)} passages",
        f"{len(fitted.turns) - 1} earlier turns",
        f"{report.reused_tokens:,} of {report.prompt_tokens:,} tokens reused",
        f"first token after {output.duration(report.seconds.time_to_first_token)}",
    ]
    if answer.finish_reason == "cancelled":
        parts.append("stopped")
    output.side_console().print(", ".join(parts), style="dim", soft_wrap=True)


def _lines() -> Iterator[str]:
    """Yield what is typed or piped in, without blank lines, to the end of input."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its line editing)
    while True:
        try:
            line = input(INPUT_PROMPT if typed else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            typer.echo(f"\n/exit or the end of input leaves; also {COMMANDS}", err=True)
            continue
        if line:
            yield line


@contextlib.contextmanager
def _ctrl_c_sets_event() -> Iterator[Event]:
    """Turn Ctrl-C into a set event, which stops an answer within one step of the model."""
    stopped = Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
