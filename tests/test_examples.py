"""The examples run, and what they print is right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_quickstart_answers_from_stored_kv(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    out = capsys.readouterr().out
    wanted = re.findall(r"right answer: (.+)\)", out)
    given = re.findall(r"contextual KV: +(\S+) ", out)
    assert len(wanted) == len(given) == 3
    assert sum(a == b for a, b in zip(wanted, given, strict=True)) >= 2
    assert all(int(reused) > 800 for reused in re.findall(r"\[(\d+) of", out))
