"""Results of one rule on one question, and the file in which an evaluation keeps them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.dataset import EvalQuestion
from cacheblend_rag.quality.fidelity import PromptFidelity
from cacheblend_rag.quality.metrics import exact_match, holds_answer, rouge_l, token_f1
from cacheblend_rag.text.prompt import BlendPrompt

Key = Mapping[str, Any]
"""What a result depends on, in plain JSON values."""


@dataclass(frozen=True)
class PromptRecord:
    """One rule's result on one question.

    text: the answer. exact, f1, rouge, holds: its scores. compute_share: as in BlendReport.
    chunk_tokens: tokens of the prompt's chunks. fresh_tokens: those of them that were computed.
    not_blended: why the prompt was not blended, None if it was, or was not meant to be. fidelity:
    to full prefill of the same prompt. whole: to full prefill of the whole documents; None if these
    are the same prompt. ttft_seconds: time to first token; None if that was not to be measured.
    """

    text: str
    exact: float
    f1: float
    rouge: float
    holds: float
    compute_share: float
    chunk_tokens: int
    fresh_tokens: int
    not_blended: str | None = None
    fidelity: PromptFidelity | None = None
    whole: PromptFidelity | None = None
    ttft_seconds: float | None = None

    @classmethod
    def of(
        cls, generation: Generation, text: str, golds: Sequence[str], **measured: Any
    ) -> PromptRecord:
        """Score an answer. text: what counts as its text. measured: the last four fields."""
        report = generation.report
        return cls(
            text=text,
            exact=exact_match(text, golds),
            f1=token_f1(text, golds),
            rouge=rouge_l(text, golds),
            holds=float(holds_answer(text, golds)),
            compute_share=report.compute_share,
            chunk_tokens=sum(chunk.tokens for chunk in report.chunks),
            fresh_tokens=sum(c.recomputed if c.hit else c.tokens for c in report.chunks),
            **measured,
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PromptRecord:
        """Read what asdict gives."""
        nested = {
            name: PromptFidelity(**plain[name]) if plain[name] else None
            for name in ("fidelity", "whole")
        }
        return cls(**{**plain, **nested})


def question_key(question: EvalQuestion, prompt: BlendPrompt) -> str:
    """Return a hash of all that a question's results depend on."""
    documents = [[d.document_id, d.separator, list(d.chunks)] for d in question.documents]
    passages = [[p.text, p.document_id, list(p.context)] for p in question.passages]
    parts = [prompt.text, prompt.is_rendered, list(question.answers), documents, passages]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class RecordLog:
    """Results by key, in memory and, if it has a file, there as JSON lines.

    A line is an object with ``key`` and ``record``. Each is on disk as soon as it is known, so that
    an interrupted evaluation can go on; a last line that was not finished is dropped.
    """

    def __init__(self) -> None:
        self._records: dict[str, PromptRecord] = {}
        self._path: Path | None = None

    @classmethod
    def begun(cls, path: Path) -> Self:
        """Begin a new file; raises ConfigError if there is one, or it cannot be written."""
        if path.exists():
            raise ConfigError(f"--out {path} exists: go on with --resume, or name another file")
        return cls.resumed(path)

    @classmethod
    def resumed(cls, path: Path) -> Self:
        """Go on with a file, or begin it if there is none.

        Raises DatasetError for a line that is not a result, ConfigError if it cannot be written.
        """
        log = cls()
        log._path = path
        try:
            held = path.read_bytes() if path.exists() else b""
            done = held.rfind(b"\n") + 1
            for number, line in enumerate(held[:done].splitlines(), 1):
                log._read(line, f"{path}, line {number}")
            path.write_bytes(held[:done])
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        return log

    def get(self, key: Key) -> PromptRecord | None:
        """Return the result of a key, or None."""
        return self._records.get(_text(key))

    def put(self, key: Key, record: PromptRecord) -> None:
        """Keep a result."""
        self._records[_text(key)] = record
        if self._path is not None:
            line = json.dumps({"key": key, "record": asdict(record)}, ensure_ascii=False)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def __iter__(self) -> Iterator[PromptRecord]:
        return iter(self._records.values())

    def _read(self, line: bytes, where: str) -> None:
        try:
            plain = json.loads(line)
            self._records[_text(plain["key"])] = PromptRecord.from_plain(plain["record"])
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{where} is not a result of this evaluation: {error}") from error


def _text(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
