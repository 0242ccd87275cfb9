"""``cacheblend-rag doctor``: checks versions, devices, models, servers and requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.cli.named_settings import SetOption, engine_options
from cacheblend_rag.cli.one_request import opened_prompt, opened_question
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.models import DEFAULT_MODEL, LOCAL_MODELS
from cacheblend_rag.observe import environment
from cacheblend_rag.rag import DEFAULT_FOLDER
from cacheblend_rag.settings.options import check_server_url

if TYPE_CHECKING:
    from cacheblend_rag.observe.doctor import Diagnosis


def doctor_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help=f"{LOCAL_MODELS}.", show_default=DEFAULT_MODEL),
    ] = None,
    *,
    url: Annotated[
        str | None,
        typer.Option(help="A server's URL: check that instead. CACHEBLEND_API_KEY is its key."),
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run the prompt in this file, and say what is wrong."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="With --question: a collection made by `index`.",
            show_default=str(DEFAULT_FOLDER),
        ),
    ] = None,
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="Run a question to a collection.")
    ] = None,
    settings: SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check versions, devices and a model, or a server; exit code 1 if it cannot blend.

    With --url, MODEL names the tokenizer that must be the server's. With --prompt or --question a
    request is run, and what is wrong with it named; exit code 1 if there is a fault. --set
    kv_path=FOLDER names the store of chunk KV and the registry of known chunks.
    """
    if url is not None:
        check_server_url(url)
    given = engine_options(settings, model=model, engine=url)
    if prompt is None and question is None:
        if folder is not None:
            raise ConfigError("--from FOLDER needs a question: give --question")
        _examine(model, url, given, as_json=as_json)
        return
    if prompt is not None and (question is not None or folder is not None):
        raise ConfigError("--prompt and --question: give one of them")
    from cacheblend_rag.observe.doctor import diagnose

    with output.stdout_reserved(as_json), output.progress_bar(lines=True) as progress:
        opened = (
            opened_question(folder or DEFAULT_FOLDER, question or "", given, progress)
            if prompt is None
            else opened_prompt(prompt, given, progress)
        )
        with opened as asked:
            task = progress.begin("examining a request", 0)
            found = diagnose(asked.engine, asked.prompt, question=asked.question, on_step=task.note)
            task.end()
    if as_json:
        output.print_json(found.to_dict())
    else:
        _print_diagnosis(found)
    if found.has_fault:
        raise typer.Exit(1)


def _print_diagnosis(found: Diagnosis) -> None:
    """Print a line on what was run and how long it took, and each finding in four."""
    told, now = found.evidence, found.evidence.in_force
    line = f"{told.prompt_tokens:,} tokens, {len(told.chunks)} chunks: "
    if not told.full_seconds:
        line += "not answered"
    elif not told.is_blended:
        line += f"not blended, full prefill {output.duration(told.full_seconds)}"
    else:
        blend, full = (output.duration(one) for one in (told.blend_seconds, told.full_seconds))
        line += f"first token: blend {blend}, full prefill {full}"
    if now is not None and now.loss is not None:
        line += f", loss {now.loss:.3f} nats per token"
    lines = [line, *([] if found.findings else ["no findings"])]
    for number, one in enumerate(found.findings, start=1):
        kind, change = "fault" if one.is_fault else "note", one.change
        figures = ", ".join(f"{name} {value}" for name, value in one.evidence.items())
        lines += (
            f"{number}. {one.code} ({kind}, {one.symptom}): {one.sentence}",
            f"   measured: {figures}",
            f"   change {change.setting}: {change.present} -> {change.proposed}",
            f"   expect: {change.effect}",
        )
    for line in lines:
        typer.echo(output.printable(line))


def _examine(
    model: str | None, url: str | None, given: Mapping[str, Any], *, as_json: bool
) -> None:
    """Check a server, or this machine with a model."""
    model = model if url else model or DEFAULT_MODEL
    with output.stdout_reserved(as_json):
        try:
            if url is not None:
                namespace = given.get("namespace", "default")
                found = environment.examine_server(url, model, namespace)
            else:
                name = options.local_model(str(model))
                found = environment.examine_model(name, given.get("device"))
        except CacheBlendError as error:
            found = {"url": url} if url else {"model": model}
            found["problem"] = str(error)
        told = found
        if url is None:
            versions, devices = environment.examine_versions(), environment.examine_devices()
            told = {"versions": versions, "devices": devices, "model": found}
    usable = not found["problem"]
    if as_json:
        output.print_json({**told, "usable": usable})
    elif url is not None and "model" not in found:
        typer.echo(f"not usable: {output.printable(found['problem'])}")
    else:
        output.print_facts("usable" if usable else "not usable", dict(_facts(told)))
    if not usable:
        raise typer.Exit(1)


def _facts(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values with their names, which hold those of what they are part of."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _facts(value, f"{name} {key}".strip())
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for number, value in enumerate(found, start=1):
            yield from _facts(value, f"{name} {number}")
    elif found is not None:
        yield name, found
