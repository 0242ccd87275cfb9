"""``cacheblend-rag doctor --prompt`` and ``--collection``: diagnoses one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.ordering import PassageOrder
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PromptLike
    from cacheblend_rag.observe.doctor.diagnose import Diagnosis
    from cacheblend_rag.rag.progress import ProgressCallbacks
    from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class RequestOptions:
    """The options of a request to diagnose, as they were given.

    Raises ConfigError for those that exclude one another, PromptError for a prompt that cannot be
    read.
    """

    prompt: Path | None
    collection: Path | None
    question: str | None
    model: str | None
    url: str | None
    namespace: str
    kv_path: Path | None
    store: list[str] | None
    instruction: str | None
    lead_in: str | None
    ratio: float | None
    selector: str | None
    check_layers: str | None
    profile: str | None
    device: str | None
    top_k: int
    runs: int
    answer_tokens: int
    verify: bool

    def check(self) -> None:
        """Check what can be checked before anything is loaded."""
        if self.prompt is not None and self.collection is not None:
            raise ConfigError("--prompt and --collection: give one of them")
        if self.question is not None and self.collection is None:
            raise ConfigError("--question is asked of a collection: give --collection, too")
        if self.collection is not None and self.question is None:
            raise ConfigError("--collection needs a question: give --question")
        if self.verify and self.url is not None:
            raise ConfigError("--verify checks a model on this machine: leave out --url")
        self._check_settings()

    def _check_settings(self) -> None:
        from cacheblend_rag.settings import BlendConfig, LeadInConfig

        config = BlendConfig(**self.overrides())
        LeadInConfig.of(self.lead_in)
        options.store_settings(self.store, kv_path=self.store_folder)
        if self.selector is not None:
            checks.check_selector(self.selector)
        checks.check_placement(self.device)
        if self.prompt is None:
            return
        checks.check_engine(self.url or EMBEDDED)
        if self.url is None:
            checks.check_model(self.model or DEFAULT_MODEL)
        if self.url is None and self.check_layers is not None:
            checks.check_check_layers(config, self.model or DEFAULT_MODEL)

    @property
    def store_folder(self) -> Path | None:
        """The folder of chunk KV; raises StoreError if it is a collection's."""
        if self.prompt is None or self.kv_path is None:
            return None
        return options.store_folder(self.kv_path)

    def overrides(self) -> dict[str, Any]:
        """Return the given settings of a request by their names."""
        layers = self.check_layers
        found = {
            "recompute_ratio": self.ratio,
            "selector": self.selector,
            "check_layers": None if layers is None else options.layers(layers, "--check-layers"),
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class OpenedRequest:
    """An opened engine with the prompt to diagnose, its settings, and the question, if known."""

    engine: Engine
    prompt: PromptLike
    config: BlendConfig
    question: str = ""


def diagnose_request(given: RequestOptions, *, as_json: bool) -> None:
    """Diagnose a request, print the findings; exits with code 1 if one is a fault."""
    text = None if given.prompt is None else _text_of(given.prompt)
    given.check()
    with output.stdout_reserved(as_json), output.progress_bar(lines=True) as progress:
        verdict = _verified(given, progress) if given.verify else None
        with _opened(given, text, progress) as request:
            from cacheblend_rag.observe.doctor.diagnose import diagnose

            task = progress.begin("examining a request", 0)
            found = diagnose(
                request.engine,
                request.prompt,
                config=request.config,
                question=request.question,
                runs=given.runs,
                answer_tokens=given.answer_tokens,
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


def _text_of(path: Path) -> str:
    text = options.read_text(path, "--prompt")
    if not text.strip():
        raise PromptError(f"--prompt {path} is empty: give the whole prompt")
    return text


@contextmanager
def _opened(
    given: RequestOptions, text: str | None, progress: ProgressCallbacks
) -> Iterator[OpenedRequest]:
    if text is None:
        yield from _of_collection(given, progress)
        return
    from cacheblend_rag.settings import EngineConfig, LeadInConfig, Profile

    store = options.store_settings(given.store, kv_path=given.store_folder)
    settings = EngineConfig(
        engine=given.url or EMBEDDED,
        model=given.model or ("" if given.url else DEFAULT_MODEL),
        instruction=given.instruction or "",
        namespace=given.namespace,
        store=store.with_changes(read_only=given.kv_path is not None or store.outlives),
        profile=Profile.chosen(given.profile),
        device=given.device,
        lead_in=LeadInConfig.of(given.lead_in),
    )
    with closing(asking.load_engine(settings, progress)) as engine:
        config = engine.config.with_changes(**given.overrides())
        yield OpenedRequest(engine, text, config)


def _of_collection(given: RequestOptions, progress: ProgressCallbacks) -> Iterator[OpenedRequest]:
    from cacheblend_rag.rag.answering import Asker

    question = clean_question(given.question or "")
    placement = Placement(
        given.device, options.collection_store(given.store), profile=given.profile
    )
    folder = given.collection or Path()
    with Asker(folder, placement, given.url, progress=progress) as asker:
        sources = asker.retrieve(question, given.top_k, PassageOrder.SCORE)
        fitted = asker.fit((), question, sources, asking.MAX_TOKENS)
        config = asker.config.with_changes(**given.overrides())
        yield OpenedRequest(asker.engine, fitted.prepared, config, question)


def _verified(given: RequestOptions, progress: ProgressCallbacks) -> Any:
    """Return the verdict of `verify` on the model of a request."""
    from cacheblend_rag.quality.verify.gate import verify_model
    from cacheblend_rag.rag.collection import Collection

    model = given.model or DEFAULT_MODEL
    if given.collection is not None:
        with Collection.open(given.collection) as collection:
            model = collection.settings.model
    checks.check_model(model)
    task = progress.begin(f"verifying {model}", 0)
    verdict = verify_model(
        model,
        profile=given.profile,
        device=given.device,
        on_check=lambda check: task.note(f"{check.name}: {check.status}"),
    )
    task.end()
    return verdict


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
