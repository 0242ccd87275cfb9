"""``ask`` without a question: a chat over a collection, line by line."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import typer

from cacheblend_rag.cli import asking, output
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.ordering import PassageOrder

if TYPE_CHECKING:
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.rag.answering import Asker
    from cacheblend_rag.rag.conversation import Answered, Conversation

INPUT_PROMPT = "> "
COMMANDS = "/sources, /report, /reset, /exit"


@dataclass(frozen=True)
class _Chat:
    """A conversation over a collection; saved_in: its file, if it has one."""

    asker: Asker
    conversation: Conversation
    top_k: int
    order: PassageOrder
    saved_in: Path | None

    def save(self) -> None:
        if self.saved_in is not None:
            self.conversation.save(self.saved_in)


def chat(
    asker: Asker,
    sampling: SamplingParams,
    top_k: int,
    order: PassageOrder,
    saved_in: Path | None,
) -> None:
    """Answer questions, one per line, until the input ends; saved_in: goes on from this file."""
    from cacheblend_rag.rag.conversation import Conversation

    settings: dict[str, Any] = {
        "instruction": asker.instruction,
        "sampling": sampling,
        "config": asker.config,
    }
    if saved_in is not None and saved_in.exists():
        conversation = Conversation.load(saved_in, asker.engine, **settings)
    else:
        conversation = Conversation(asker.engine, **settings)
    running = _Chat(asker, conversation, top_k, order, saved_in)
    for line in _lines():
        if line == "/exit":
            return
        try:
            _take(line, running)
        except CacheBlendError as error:
            output.warn(str(error))


def _take(line: str, chat: _Chat) -> None:
    """Run a line: a command or a question."""
    last = chat.conversation.last
    if not line.startswith("/"):
        _ask(clean_question(line), chat)
    elif line == "/reset":
        chat.conversation.forget()
        chat.save()
    elif line not in {"/sources", "/report"}:
        output.warn(f"{line} is not a command: {COMMANDS}")
    elif last is None:
        output.warn("nothing was asked yet")
    elif line == "/sources":
        asking.print_sources(last.fitted.sources)
    else:
        asking.print_report(last.answer.report)


def _ask(question: str, chat: _Chat) -> None:
    conversation, found = chat.conversation, chat.asker.retrieve(question, chat.top_k, chat.order)
    with _ctrl_c_sets_event() as cancel:
        for _ in asking.written(conversation.stream(question, found, cancel=cancel)):
            pass
    if conversation.last:
        _remark(conversation.last)
    chat.save()


def _remark(done: Answered) -> None:
    """Print a summary of an answer in one line on stderr."""
    fitted, report = done.fitted, done.answer.report
    parts = [
        f"{len(fitted.sources)} passages",
        f"{len(fitted.turns) - 1} earlier turns",
        f"{report.reused_tokens:,} of {report.prompt_tokens:,} tokens reused",
        f"first token after {output.duration(report.seconds.time_to_first_token)}",
    ]
    if done.answer.finish_reason == "cancelled":
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
