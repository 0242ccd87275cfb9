"""Reads a report, or an explained prompt, from the JSON that this package's commands print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.observe.explained import Cost, Explained
from cacheblend_rag.plain import read_plain
from cacheblend_rag.report import REASONS, BlendReport

MOST_BYTES = 64 << 20


def read_explained(path: Path) -> Explained:
    """Read what ``explain --json``, ``ask --json`` or ``BlendReport.to_dict`` wrote.

    Raises ConfigError when the file cannot be read, or holds something else.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is larger than {MOST_BYTES >> 20} MiB: it is no report")
        plain = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON file: {error!s:.80}") from error
    try:
        return _explained(plain)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no report as `ask --json` or report.to_dict() writes it: {error!s:.100}"
        ) from error


def _explained(plain: Any) -> Explained:
    if not isinstance(plain, Mapping):
        raise ValueError("it is not an object")
    sent = plain.get("report", plain)
    report = read_report(sent)
    tokens = plain.get("tokens") if sent is not plain else None
    if tokens and (
        not isinstance(tokens, list)
        or len(tokens) != report.prompt_tokens
        or not all(isinstance(one, str) for one in tokens)
    ):
        raise ValueError("tokens must be a text for each token of the prompt")
    answer, cost = plain.get("answer", ""), plain.get("cost")
    return Explained(
        report=report,
        tokens=tuple(tokens or ()),
        answer=answer if isinstance(answer, str) else "",
        cost=None if cost is None or sent is plain else read_plain(Cost, cost),
    )


def read_report(plain: Any) -> BlendReport:
    """Read a report from the values of ``BlendReport.to_dict``.

    Raises ValueError, TypeError or OverflowError when it is something else.
    """
    if not isinstance(plain, Mapping):
        raise ValueError("the report is not an object")
    pairs = {name: [plain.get(f"{name}_code"), plain[name]] for name in REASONS if plain.get(name)}
    none = dict.fromkeys(name for name in REASONS if name not in pairs)
    report = read_plain(BlendReport, {**plain, **none, **pairs})
    tokens = report.prompt_tokens
    if not 0 <= report.reused_tokens + report.recomputed_tokens <= tokens:
        raise ValueError(f"prompt_tokens={tokens} is below the tokens that were reused")
    for chunk in report.chunks:
        parts = (chunk.tokens, chunk.recomputed, chunk.edge_tokens)
        if chunk.start < -1 or min(parts) < 0 or chunk.start + chunk.tokens > tokens:
            raise ValueError(f"chunk {chunk.chunk_id[:32]} does not fit the prompt")
    if report.trace is not None and not report.trace.fits(tokens):
        raise ValueError("the trace does not fit the prompt")
    return report
