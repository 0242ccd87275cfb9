from __future__ import annotations

import io
import json
import re
import sys
import time

import pytest
from rich.console import Console

from cacheblend_rag.cli import output


def test_reserved_stdout_sends_prints_to_stderr(capsys):
    with output.stdout_reserved(True):
        sys.stdout.write("noise\n")
    output.print_json({"a": 1})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1}
    assert captured.err == "noise\n"


def test_json_refuses_what_json_cannot_say():
    with pytest.raises(ValueError, match="JSON compliant"):
        output.print_json({"a": float("nan")})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12.3 ms"), (0.0999, "99.9 ms"), (1.236, "1.24 s")]
)
def test_durations_carry_their_unit(seconds, text):
    assert output.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "less than a second"), (75, "75 s"), (150, "2.5 min"), (9000, "2.5 h")],
)
def test_estimates_are_rough(seconds, text):
    assert output.rough_duration(seconds) == text


def test_terminals_are_sent_no_control_characters():
    assert output.printable("a\x1b[31mred\x07\r\n\ttab \x9b1m") == "a[31mred\n\ttab 1m"


def test_a_terminal_shows_phases_tasks_and_notes(monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    monkeypatch.setattr(output, "side_console", lambda: console)
    with output.progress_bar() as watcher:
        with watcher.phase("loading the model"):
            pass
        task = watcher.begin("files", 3)
        task.note("reading notes.txt")
        task.advance(2)
        deadline = time.monotonic() + 10
        while "2/3" not in shown.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)  # it is drawn a few times a second
        watcher.warn("a\x1b[31m file\nskipped")
        task.end()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    for said in ("loading the model", "files", "2/3", "reading notes.txt"):
        assert said in text
    assert "warning: a[31m file skipped" in text
