"""``cacheblend-rag ask``: one question, a chat, or a long document."""

from __future__ import annotations

import collections
import contextlib
import io
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.cli.named_settings import SetOption, engine_options, split
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptError
from cacheblend_rag.rag import DEFAULT_FOLDER
from cacheblend_rag.rag.prompt import PassageOrder

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.rag.answering import Asker
    from cacheblend_rag.rag.conversation import Answered, Conversation
    from cacheblend_rag.rag.prompt import FittedPrompt, Source

INPUT_PROMPT = "> "
COMMANDS = "/sources, /report, /reset, /exit"


def ask_command(
    context: typer.Context,
    question: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUESTION",
            help="The question. Without one a chat begins; of a --document, a summary is asked.",
        ),
    ] = None,
    *,
    folder: asking.FromOption = DEFAULT_FOLDER,
    top_k: asking.TopKOption = asking.TOP_K,
    order: asking.OrderOption = PassageOrder.SCORE,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer by full prefill, and compare.")
    ] = False,
    document: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="In place of a collection: text, Markdown, HTML or PDF of any length.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Go on with the chat, or a document's answers, saved in FILE."
        ),
    ] = None,
    engine: options.EngineOption = None,
    settings: SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Answer from a collection or, window by window, from one document of any length.

    In a chat, each line is a question: /sources and /report show those of the last answer, /reset
    forgets all turns and evicts their KV, /exit or the end of input ends, and Ctrl-C stops an
    answer. --set takes settings of sampling, too (max_tokens, temperature, top_p, seed, ...), and,
    with --document, of its windows: chunk_tokens, overlap, window, combine.
    """
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.rag.answering import Asker, clean_question
    from cacheblend_rag.rag.document_windows import AnalysisPlan

    if question is not None and len(question) > 1:
        raise PromptError(f'the question must stand in quotes: ask "{" ".join(question)}"')
    text = None if question is None else clean_question(question[0])
    sampling, settings = split(settings, SamplingParams)
    if document is not None:
        options.refuse(
            context,
            ("folder", "top_k", "order", "compare"),
            "for a collection only, leave out --document",
        )
        plan, settings = split(settings, AnalysisPlan)
        from cacheblend_rag.cli.ask_document import ask_document

        ask_document(
            document,
            text,
            plan,
            sampling,
            engine_options(settings, engine=engine),
            resume=resume,
            as_json=as_json,
        )
        return
    if text is None:
        options.refuse(context, ("compare", "as_json"), "for one question only, give it")
    else:
        options.refuse(context, ("resume",), "goes on with a chat, leave the question out")
    given = engine_options(settings, engine=engine)
    if compare:
        if other := sorted(sampling.given().keys() - {"max_tokens"}):
            raise ConfigError(f"--compare compares greedy answers: leave out --set {other[0]}")
        sampling = SamplingParams.greedy(sampling.max_tokens)
        # Full prefill uses no cached prefix, so the blend that is compared with it does not either.
        given["blend"] = {**given.get("blend", {}), "reuse_prefix": False}
    given.setdefault("fill_on_miss", text is None)  # useless where the process asks once and ends
    with output.stdout_reserved(as_json), contextlib.ExitStack() as stack:
        with output.progress_bar() as bar:
            asker = stack.enter_context(Asker(folder, given, progress=bar))
        if text is None:
            _chat(asker, sampling, top_k, order, resume)
            return
        fitted, answer, full = _answered(
            asker, text, sampling, top_k, order, compare=compare, shown=not as_json
        )
    if as_json:
        output.print_json(_plain(text, fitted, answer, full))
        return
    if full:
        typer.echo(f"\nfull prefill:\n{output.printable(full.text).strip()}")
    typer.echo("\nsources:")
    asking.print_sources(fitted.sources)
    typer.echo("\nreport:")
    asking.print_report(answer.report)
    if full:
        blended, ordinary = _first_token(answer), _first_token(full)
        typer.echo(
            f"\nfirst token: blend {output.duration(blended)}, full prefill "
            f"{output.duration(ordinary)}, {ordinary / blended:.1f}x sooner"
        )


def _answered(
    asker: Asker,
    question: str,
    asked: SamplingParams,
    top_k: int,
    order: PassageOrder,
    *,
    compare: bool,
    shown: bool,
) -> tuple[FittedPrompt, Generation, Generation | None]:
    """Return the prompt, its answer, and the one by full prefill to compare it with."""
    from cacheblend_rag.rag.answering import finished
    from cacheblend_rag.rag.prompt import Turn

    sampling = asker.stopping(asked)
    sources = asker.retrieve(question, top_k, order)
    fitted = asker.fit((), Turn.of(question, sources), sampling.max_tokens)
    if left_out := len(sources) - len(fitted.sources):
        output.warn(f"{left_out} of {len(sources)} passages left out: no room in the prompt")
    if compare:  # untimed, both ways, so that no timing includes first-request costs
        first = sampling.with_changes(max_tokens=1)
        finished(asker.engine.stream(fitted.prepared, first))
        asker.engine.generate_full(fitted.prepared, first)
    deltas = asker.engine.stream(fitted.prepared, sampling)
    if shown and compare:
        typer.echo("blend:")
    answer = finished(asking.written(deltas) if shown else deltas)
    full = asker.engine.generate_full(fitted.prepared, sampling) if compare else None
    return fitted, answer, full


def _plain(
    question: str, fitted: FittedPrompt, answer: Generation, full: Generation | None
) -> dict[str, Any]:
    """Return plain JSON values."""
    sources = [source.to_dict() for source in fitted.sources]
    plain = {"question": question, **_plain_answer(answer), "sources": sources}
    if full:
        plain["full"] = _plain_answer(full)
        plain["speedup"] = _first_token(full) / _first_token(answer)
    return plain


def _plain_answer(generation: Generation) -> dict[str, Any]:
    return {
        "answer": generation.text.strip(),
        "finish_reason": generation.finish_reason,
        "sampling": generation.sampling.to_dict(),
        "report": generation.report.to_dict(),
    }


def _first_token(generation: Generation) -> float:
    return generation.report.seconds.time_to_first_token


def _chat(
    asker: Asker, sampling: SamplingParams, top_k: int, order: PassageOrder, saved_in: Path | None
) -> None:
    """Answer questions, one per line, until the input ends; saved_in: goes on from this file."""
    from cacheblend_rag.rag.conversation import Conversation

    settings: dict[str, Any] = {"instruction": asker.instruction, "sampling": sampling}
    if saved_in is not None and saved_in.exists():
        conversation = Conversation.load(saved_in, asker.engine, **settings)
    else:
        conversation = Conversation(asker.engine, **settings)
    for line in _lines():
        if line == "/exit":
            return
        try:
            if line == "/reset":
                conversation.forget()
            elif line.startswith("/"):
                _show(line, conversation.last)
            else:
                found = asker.retrieve(line, top_k, order, conversation.turns)
                _ask(conversation, line, found)
            if saved_in is not None:
                conversation.save(saved_in)
        except CacheBlendError as error:
            output.warn(str(error))


def _show(command: str, last: Answered | None) -> None:
    """Print the sources or the report of the last answer."""
    if command not in ("/sources", "/report"):
        output.warn(f"{command} is not a command: {COMMANDS}")
    elif last is None:
        output.warn("nothing was asked yet")
    elif command == "/sources":
        asking.print_sources(last.fitted.sources)
    else:
        asking.print_report(last.answer.report)


def _ask(conversation: Conversation, question: str, passages: Sequence[Source]) -> None:
    """Print an answer as it comes, and a summary of it in one line on stderr."""
    with _ctrl_c_sets_event() as cancel:
        deltas = conversation.stream(question, passages, cancel=cancel)
        collections.deque(asking.written(deltas), maxlen=0)
    if (done := conversation.last) is None:
        return
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
