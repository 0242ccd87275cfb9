"""``cacheblend-rag doctor --prompt`` and ``--collection``: diagnoses one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.cli.verify import verified
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import Asker, clean_question
from cacheblend_rag.rag.collection import Collection
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.ordering import PassageOrder
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PromptLike
    from cacheblend_rag.observe.doctor.diagnose import Diagnosis
    from cacheblend_rag.progress import ProgressCallbacks
    from cacheblend_rag.settings import EngineConfig


Opened = tuple["Engine", "PromptLike", str]
"""An opened engine, the prompt to diagnose, and its question; "" if that is not known."""


def diagnose_request(
    prompt: Path | None,
    collection: Path | None,
    question: str | None,
    *,
    model: str | None,
    url: str | None,
    namespace: str,
    kv_path: Path | None,
    store: list[str] | None,
    instruction: str | None,
    lead_in: str | None,
    ratio: float | None,
    selector: str | None,
    check_layers: str | None,
    profile: str | None,
    device: str | None,
    top_k: int,
    runs: int,
    answer_tokens: int,
    verify: bool,
    as_json: bool,
) -> None:
    """Diagnose a request, print the findings; exits with code 1 if one is a fault.

    Arguments are those of `doctor`. What can be checked is checked before anything is loaded.
    """
    text = None if prompt is None else _text_of(prompt)
    _check_together(prompt, collection, question)
    if verify and url is not None:
        raise ConfigError("--verify checks a model on this machine: leave out --url")
    from cacheblend_rag.settings import BlendConfig, LeadInConfig

    given = {"recompute_ratio": ratio, "selector": selector}
    changes: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
    if check_layers is not None:
        changes["check_layers"] = options.layers(check_layers, "--check-layers")
    changed = BlendConfig(**changes)
    if selector is not None:
        checks.check_selector(selector)
    opened: Callable[[ProgressCallbacks], AbstractContextManager[Opened]]
    if text is None:
        checks.check_placement(device)
        placement = Placement(device, options.collection_store(store), profile=profile)
        asked = clean_question(question or "")
        opened = partial(
            _of_collection, collection or Path(), asked, placement, url=url, top_k=top_k
        )
    else:
        folder = None if kv_path is None else options.store_folder(kv_path)
        kept = options.store_settings(store, kv_path=folder)
        config = asking.checked_config(
            url or EMBEDDED,
            model or ("" if url else DEFAULT_MODEL),
            store=kept.with_changes(read_only=kv_path is not None or kept.outlives),
            device=device,
            profile=profile,
            instruction=instruction or "",
            namespace=namespace,
            lead_in=LeadInConfig.of(lead_in),
        )
        if url is None and check_layers is not None:
            checks.check_check_layers(changed, config.model)
        opened = partial(_of_prompt, text, config)
    with output.stdout_reserved(as_json), output.progress_bar(lines=True) as progress:
        verdict = None
        if verify:
            name = (_model_of(collection) if collection else model) or DEFAULT_MODEL
            checks.check_model(name)
            verdict = verified(
                name, progress, config=EngineConfig.gather(profile=profile, device=device)
            )
        with opened(progress) as (engine, asked_prompt, about):
            from cacheblend_rag.observe.doctor.diagnose import diagnose

            task = progress.begin("examining a request", 0)
            found = diagnose(
                engine,
                asked_prompt,
                config=engine.config.with_changes(**changes),
                question=about,
                runs=runs,
                answer_tokens=answer_tokens,
                verdict=verdict,
                on_step=task.note,
            )
            task.end()
    if as_json:
        output.print_json(found.to_dict())
    else:
        _print(found)
    if found.has_fault:
        raise typer.Exit(1)


def _check_together(prompt: Path | None, collection: Path | None, question: str | None) -> None:
    if prompt is not None and collection is not None:
        raise ConfigError("--prompt and --collection: give one of them")
    if question is not None and collection is None:
        raise ConfigError("--question is asked of a collection: give --collection, too")
    if collection is not None and question is None:
        raise ConfigError("--collection needs a question: give --question")


def _text_of(path: Path) -> str:
    text = options.read_text(path, "--prompt")
    if not text.strip():
        raise PromptError(f"--prompt {path} is empty: give the whole prompt")
    return text


@contextmanager
def _of_prompt(text: str, config: EngineConfig, progress: ProgressCallbacks) -> Iterator[Opened]:
    with closing(asking.load_engine(config, progress)) as engine:
        yield engine, text, ""


@contextmanager
def _of_collection(
    folder: Path,
    question: str,
    placement: Placement,
    progress: ProgressCallbacks,
    *,
    url: str | None,
    top_k: int,
) -> Iterator[Opened]:
    with Asker(folder, placement, url, progress=progress) as asker:
        sources = asker.retrieve(question, top_k, PassageOrder.SCORE)
        fitted = asker.fit((), question, sources, asking.MAX_TOKENS)
        yield asker.engine, fitted.prepared, question


def _model_of(collection: Path) -> str:
    with Collection.open(collection) as opened:
        return opened.settings.model


def _print(found: Diagnosis) -> None:
    plain = found.to_dict()
    measured = plain["measured"]
    typer.echo(_summary(measured))
    if not found.findings:
        typer.echo("no findings")
    for number, finding in enumerate(plain["findings"], start=1):
        kind = "fault" if finding["is_fault"] else "note"
        change = finding["change"]
        figures = ", ".join(f"{name} {value}" for name, value in finding["evidence"].items())
        lines = (
            f"{number}. {finding['code']} ({kind}, {finding['symptom']}): {finding['sentence']}",
            f"   measured: {figures}",
            f"   change {change['setting']}: {change['present']} -> {change['proposed']}",
            f"   expect: {change['effect']}",
        )
        for line in lines:
            typer.echo(output.printable(line))


def _summary(measured: Mapping[str, Any]) -> str:
    """Return one line: what was run, and how long it took."""
    line = f"{measured['prompt_tokens']:,} tokens, {measured['chunks']} chunks: "
    if not measured["full_seconds"]:
        return f"{line}not answered"
    full = f"full prefill {output.duration(measured['full_seconds'])}"
    if not measured["blended"]:
        return f"{line}not blended, {full}"
    blend = f"blend {output.duration(measured['blend_seconds'])}"
    loss = measured["loss_nats_per_token"]
    told = "" if loss is None else f", loss {loss:.3f} nats per token"
    return f"{line}first token: {blend}, {full}{told}"
