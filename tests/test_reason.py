"""Reasons: every code is made somewhere and documented, and no report has a reason without one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import cacheblend_rag
from cacheblend_rag.engines.vllm.protocol.result import ConnectorStatus, Result
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.prefill.policy import Decision
from cacheblend_rag.prefill.prompt_pass import FusedPrompt
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import (
    BlendReport,
    ChunkReport,
    FillReport,
    PhaseSeconds,
    PrecomputeReport,
    PrefillReport,
)

PACKAGE = Path(cacheblend_rag.__file__).parent
FIRST_CELL = re.compile(r"^\| (`.+?) \|", re.MULTILINE)
SLOW = Reason(ReasonCode.SLOW, "ordinary prefill takes 3 ms")
REPORT = BlendReport(
    "toy", True, None, 10, 5, 1, 4, 0.2, "hkvd", "document", 0.5, PhaseSeconds(),
    (
        ChunkReport("0" * 32, 0, 6, True, recomputed=1),
        ChunkReport("1" * 32, 6, 2, False, Miss.SLOW),
    ),
)  # fmt: skip


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def test_every_code_is_made_somewhere() -> None:
    """Either by its name, or by the miss of a chunk that has it."""
    named = {"ReasonCode": set[str](), "Miss": set[str]()}
    for place, module in parsed():
        for node in ast.walk(module) if place != "reason.py" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                named.get(node.value.id, set()).add(node.attr)
    by_name = {ReasonCode[name] for name in named["ReasonCode"] if name.isupper()}
    by_miss = {getattr(Miss, name).code for name in named["Miss"]}
    assert by_name | by_miss | {ReasonCode.OTHER} == set(ReasonCode)
    assert ReasonCode("made_up") is ReasonCode.OTHER


def test_every_code_is_documented_once() -> None:
    page = (PACKAGE.parent / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## Reasons\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", " ".join(FIRST_CELL.findall(table)))
    assert named == [code.value for code in ReasonCode]


def test_every_miss_of_a_chunk_has_a_code_of_its_own() -> None:
    misses = [one for one in vars(Miss).values() if isinstance(one, Reason)]
    assert len({one.code for one in misses}) == len(set(misses)) == len(misses) > 10


def test_no_field_holds_a_reason_that_is_no_reason() -> None:
    kinds: list[Any] = [
        BlendReport, PrefillReport, FusedPrompt, Decision, PrecomputeReport,
        FillReport, ConnectorStatus, *get_args(Result),
    ]  # fmt: skip
    found = set()
    for kind in kinds:
        assert is_dataclass(kind)
        hints = get_type_hints(kind)
        for field in fields(kind):
            if re.search(r"reason$|^why$|^error$|^refus|^failed$|^unreadable$", field.name):
                hint = hints[field.name]
                inner = {*get_args(hint)} - {NoneType, int, str} or {hint}
                assert inner == {Reason}, f"{kind.__name__}.{field.name}"
                found.add(f"{kind.__name__}.{field.name}")
    assert len(found) > 15


def test_json_has_each_code_beside_its_sentence() -> None:
    told = json.loads(json.dumps(replace(REPORT, reason=SLOW, ratio_reason=SLOW).to_dict()))
    assert (told["reason"], told["reason_code"]) == ("ordinary prefill takes 3 ms", "slow")
    assert (told["ratio_reason"], told["ratio_reason_code"]) == (SLOW, "slow")
    assert (told["selector_reason"], told["selector_reason_code"]) == (None, None)
    assert [chunk["reason_code"] for chunk in told["chunks"]] == [None, "slow"]
    assert [chunk["reason"] for chunk in told["chunks"]] == [None, "slow"]


def test_a_refused_model_says_what_of_it_is_not_supported() -> None:
    error = UnsupportedModelError("ALiBi", ReasonCode.UNSUPPORTED_POSITIONS)
    assert (error.reason, error.reason.code) == (str(error), ReasonCode.UNSUPPORTED_POSITIONS)
    assert UnsupportedModelError("x").reason.code is ReasonCode.UNSUPPORTED_LAYERS
