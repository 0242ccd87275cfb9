"""``cacheblend-rag explain``: why a prompt was served as it was, token by token."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.collection import DEFAULT_FOLDER
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.ordering import PassageOrder
from cacheblend_rag.settings import EMBEDDED, check_namespace

if TYPE_CHECKING:
    from cacheblend_rag.observe.explained import Explained

MAX_TOKENS = 16


def explain_command(
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="A question to a collection.")
    ] = None,
    *,
    folder: asking.FromOption = DEFAULT_FOLDER,
    prompt: Annotated[
        Path | None, typer.Option("--prompt", metavar="FILE", help="A file that holds a prompt.")
    ] = None,
    model: options.ModelOption = DEFAULT_MODEL,
    kv_path: Annotated[
        Path | None,
        typer.Option(
            envvar=options.KV_PATH_VARIABLE,
            help="With --prompt: the folder of chunk KV, and of the list of known chunks.",
        ),
    ] = None,
    passage: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="With --prompt: a text file that is a known chunk."),
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(help="With --prompt: the instruction that chunks were precomputed after."),
    ] = None,
    namespace: Annotated[str, typer.Option(help="With --prompt: of the chunk KV.")] = "default",
    top_k: asking.TopKOption = asking.TOP_K,
    order: asking.OrderOption = PassageOrder.SCORE,
    max_tokens: options.MaxTokensOption = MAX_TOKENS,
    ratio: asking.RatioOption = None,
    selector: asking.SelectorOption = None,
    profile: options.ProfileOption = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also measure full prefill: its time, and how far the blend is."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page that needs no script and no network."),
    ] = None,
    engine: options.EngineOption = None,
    device: options.DeviceOption = None,
    store: options.StoreOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Explain which chunks were reused and why, which tokens were recomputed, and what it cost.

    The prompt is answered once with a trace.
    """
    if (question is None) == (prompt is None):
        raise ConfigError("explain: give one of QUESTION and --prompt FILE")
    _check_page(html)
    asked = clean_question(question) if question is not None else ""
    with output.stdout_reserved(as_json):
        if prompt is not None:
            text = options.read_text(prompt, "--prompt")
            known = [options.read_text(one, "--passage") for one in passage or ()]
            check_namespace(namespace)
            checks.check_blend(ratio, selector)
            folder = None if kv_path is None else options.store_folder(kv_path)
            config = asking.checked_config(
                engine or EMBEDDED,
                model,
                store=options.store_settings(store, kv_path=folder),
                device=device,
                profile=profile,
                instruction=instruction or "",
                namespace=namespace,
            )
            from cacheblend_rag.observe.explained import explain_prompt

            with output.progress_bar() as bar:
                opened = asking.load_engine(config, bar)
            with closing(opened):
                opened.register(known)
                found = explain_prompt(
                    opened,
                    text,
                    config=opened.config.with_given(recompute_ratio=ratio, selector=selector),
                    max_tokens=max_tokens,
                    compare=compare,
                )
        else:
            placement = Placement(device, options.collection_store(store), profile=profile)
            with asking.opened(folder, placement, engine, ratio, selector) as asker:
                from cacheblend_rag.observe.explained import explain_prompt

                sources = asker.retrieve(asked, top_k, order)
                fitted = asker.fit((), asked, sources, max_tokens)
                found = explain_prompt(
                    asker.engine,
                    fitted.prepared,
                    config=asker.config,
                    max_tokens=max_tokens,
                    compare=compare,
                )
    _show(found, html, as_json=as_json)


def _check_page(html: Path | None) -> None:
    """Raise StoreError when a page cannot be written, before anything is loaded."""
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise StoreError(f"--html {html} cannot be written: name a file in an existing folder")


def _show(found: Explained, html: Path | None, *, as_json: bool) -> None:
    if html is not None:
        from cacheblend_rag.observe.explain_page import explain_page

        try:
            html.write_bytes(explain_page(found).encode("utf-8", "replace"))
        except OSError as error:
            raise StoreError(f"--html {html} cannot be written: {error.strerror}") from error
    if as_json:
        output.print_json(found.to_dict())
        return
    from cacheblend_rag.cli.explain_view import print_explained

    print_explained(found)
    if html is not None:
        output.side_console().print(f"page: {html}", markup=False, soft_wrap=True)
