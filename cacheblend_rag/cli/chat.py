"""``cacheblend-rag chat``: questions and answers over a collection, line by line."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.collection import DEFAULT_FOLDER
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.ordering import PassageOrder

if TYPE_CHECKING:
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.rag.answering import Asker
    from cacheblend_rag.rag.conversation import Answered, Conversation

INPUT_PROMPT = "> "
COMMANDS = "/sources, /report, /reset, /exit"


ResumeOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Go on with the conversation in FILE, saved there."),
]


def chat_command(
    *,
    folder: asking.FromOption = DEFAULT_FOLDER,
    top_k: asking.TopKOption = asking.TOP_K,
    max_tokens: options.MaxTokensOption = asking.MAX_TOKENS,
    temperature: options.TemperatureOption = None,
    top_p: options.TopPOption = None,
    sampling_top_k: options.SamplingTopKOption = None,
    min_p: options.MinPOption = None,
    repetition_penalty: options.RepetitionPenaltyOption = None,
    seed: options.SeedOption = None,
    ratio: asking.RatioOption = None,
    selector: asking.SelectorOption = None,
    profile: options.ProfileOption = None,
    order: asking.OrderOption = PassageOrder.SCORE,
    engine: options.EngineOption = None,
    device: options.DeviceOption = None,
    store: options.StoreOption = None,
    resume: ResumeOption = None,
) -> None:
    """Ask a collection questions, one per line, from the terminal or a pipe.

    /sources and /report show those of the last answer, /reset forgets all turns and evicts their
    KV, /exit or the end of input ends. Ctrl-C stops an answer. KV of passages that was missed is
    computed between questions.
    """
    asked = options.sampling_settings(
        max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=sampling_top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    placement = Placement(
        device, options.collection_store(store), fill_on_miss=True, profile=profile
    )
    with asking.opened(folder, placement, engine, ratio, selector) as asker:
        chat = _Chat(asker, _conversation(asker, asked, resume), top_k, order, resume)
        for line in _lines():
            if line == "/exit":
                return
            try:
                _take(line, chat)
            except CacheBlendError as error:
                output.warn(str(error))


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


def _conversation(asker: Asker, sampling: SamplingParams, saved_in: Path | None) -> Conversation:
    from cacheblend_rag.rag.conversation import Conversation

    if saved_in is None or not saved_in.exists():
        return Conversation(
            asker.engine, instruction=asker.instruction, sampling=sampling, config=asker.config
        )
    return Conversation.load(
        saved_in,
        asker.engine,
        instruction=asker.instruction,
        sampling=sampling,
        config=asker.config,
    )


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
