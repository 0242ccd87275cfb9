"""The examples, and the programs of two pages, run, and what they print is right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.models import words
from tests.readme import DOCS, ROOT, blocks
from tests.toy import TOY

EXAMPLES = ROOT / "examples"


def test_the_quickstart_answers_from_stored_kv(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    out = capsys.readouterr().out
    wanted = re.findall(r"right answer: (.+)\)", out)
    given = re.findall(r"contextual KV: +(\S+) ", out)
    assert len(wanted) == len(given) == 3
    assert sum(a == b for a, b in zip(wanted, given, strict=True)) >= 2
    assert all(int(reused) > 800 for reused in re.findall(r"\[(\d+) of", out))


def test_a_long_document_is_answered_by_the_windows_that_hold_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLES / "long_document.py"), run_name="__main__")
    out = capsys.readouterr().out
    first, second = re.findall(r"right answer: (.+)\)((?:\n.+)+)", out)
    for right, said in (first, second):
        answers = re.findall(r"^ +\d+ to +\d+: (.*)$", said, re.MULTILINE)
        assert len(answers) > 20
        assert right in answers
    computed = [
        re.findall(r"chunks computed: (\d+) of (\d+)", said)[0] for _, said in (first, second)
    ]
    assert computed[0][0] == computed[0][1]
    assert computed[1] == ("0", computed[0][1])


def test_the_program_on_conversations_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks("python", DOCS / "conversations.md")
    (tmp_path / "report.txt").write_text("\n\n".join(words(90, seed) for seed in range(8)))
    monkeypatch.chdir(tmp_path)
    exec(program.replace('"smollm2"', repr(TOY)), {})  # noqa: S102 - the page's own program
    out = capsys.readouterr().out
    (reused,) = re.findall(r"^(\d+) tokens of the first turn", out, re.MULTILINE)
    assert int(reused) > 0


def test_the_program_on_long_documents_runs_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks("python", DOCS / "long-documents.md")
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
