"""Opens what `doctor` and `explain` look at: a prompt in a file, or a question to a collection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.cli import asking, options
from cacheblend_rag.errors import PromptError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import Asker, clean_question
from cacheblend_rag.rag.prompt import PassageOrder, Turn
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.prepare import PromptLike
    from cacheblend_rag.progress import ProgressCallbacks


@dataclass(frozen=True)
class Opened:
    """An opened engine, what it is asked, and its model; question: "" if that is not known."""

    engine: Engine
    prompt: PromptLike
    model: str
    question: str = ""


@contextmanager
def opened_prompt(
    file: Path, given: Mapping[str, Any], progress: ProgressCallbacks
) -> Iterator[Opened]:
    """Open an engine with the ``given`` settings for the prompt in a file.

    What can be checked is checked before anything is loaded. The store of a folder is only read.
    """
    from cacheblend_rag.settings import EngineConfig

    text = options.read_text(file, "--prompt")
    if not text.strip():
        raise PromptError(f"--prompt {file} is empty: give the whole prompt")
    settings = {"engine": EMBEDDED, **given}
    if "://" not in settings["engine"]:
        settings.setdefault("model", DEFAULT_MODEL)
    config = EngineConfig.gather(**settings)
    if config.store.kv_path is not None:
        options.store_folder(Path(config.store.kv_path))
    if config.store.outlives:
        config = config.with_changes(store=config.store.with_changes(read_only=True))
    checks.check_config(config)
    if "check_layers" in given.get("blend", {}) and config.engine == EMBEDDED:
        checks.check_check_layers(config.blend, config.model)
    with closing(asking.load_engine(config, progress)) as engine:
        yield Opened(engine, text, config.model)


@contextmanager
def opened_question(
    folder: Path, question: str, given: Mapping[str, Any], progress: ProgressCallbacks
) -> Iterator[Opened]:
    """Open a collection's engine with the ``given`` settings, and build a question's prompt."""
    asked = clean_question(question)
    with Asker(folder, given, progress=progress) as asker:
        sources = asker.retrieve(asked, asking.TOP_K, PassageOrder.SCORE)
        fitted = asker.fit((), Turn.of(asked, sources), asking.MAX_TOKENS)
        yield Opened(asker.engine, fitted.prepared, asker.model, asked)
