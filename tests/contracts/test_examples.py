"""The programs of two pages run, and what they print is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.models import words
from tests.readme import DOCS, blocks
from tests.toy import TOY


def test_the_program_on_conversations_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, _ = blocks("python", DOCS / "conversations.md")
    (tmp_path / "report.txt").write_text("\n\n".join(words(90, seed) for seed in range(8)))
    monkeypatch.chdir(tmp_path)
    exec(program.replace('"smollm2"', repr(TOY)), {})  # noqa: S102 - the page's own program
    out = capsys.readouterr().out
    (reused,) = re.findall(r"^(\d+) tokens of the first turn", out, re.MULTILINE)
    assert int(reused) > 0


def test_the_program_on_long_documents_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, program = blocks("python", DOCS / "conversations.md")
    (tmp_path / "report.txt").write_text("\n\n".join(words(100, seed) for seed in range(30)))
    monkeypatch.chdir(tmp_path)
    kept, said = tmp_path / "answers.jsonl", []
    for _ in range(2):
        exec(program.replace('"smollm2"', repr(TOY)), {})  # noqa: S102 - the page's own program
        said.append((capsys.readouterr().out, kept.read_text()))
    assert said[0] == said[1], "nothing was asked again"
    out, answers = said[0]
    windows, width = map(int, re.findall(r"^(\d+) windows of (\d+) chunks", out)[0])
    assert windows > width == 3, "of five: the toy's context holds 4,096 tokens"
    assert len(answers.splitlines()) > windows
