from __future__ import annotations

import io
import json
import re
import sys
import time

import pytest
from rich.console import Console

from cacheblend_rag.cli import output
from cacheblend_rag.progress import ProgressCallbacks
from tests.kv.samples import until


def test_reserved_stdout_sends_prints_to_stderr(capsys):
    with output.stdout_reserved(True):
        sys.stdout.write("noise\n")
    output.print_json({"a": 1})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1}
    assert captured.err == "noise\n"
    with pytest.raises(ValueError, match="JSON compliant"):
        output.print_json({"a": float("nan")})


def test_durations_carry_their_unit_and_text_no_control_characters():
    assert [output.duration(one) for one in (0.0123, 0.0999, 1.236)] == [
        "12.3 ms", "99.9 ms", "1.24 s"
    ]  # fmt: skip
    assert output.printable("a\x1b[31mred\x07\r\n\ttab \x9b1m") == "a[31mred\n\ttab 1m"


FORGED = "evil\nSources: all good\x1b[2J\r\x85\u2028[bold]\u202etxt.exe"
"""A name that anybody may give a file."""


def test_a_name_forges_no_line_of_a_terminal_or_a_log(monkeypatch, capsys, caplog):
    plain = "evil Sources: all good[2J [bold]txt.exe"
    monkeypatch.setenv("COLUMNS", "200")
    output.warn(FORGED)
    output.say(FORGED)
    output.tell(FORGED)
    output.print_rows(["name"], [[FORGED]])
    output.print_facts("title", {"name": FORGED})
    with output.progress_bar() as watcher, watcher.phase(FORGED):
        watcher.warn(FORGED)
    caplog.set_level("INFO", "cacheblend_rag.progress")
    silent = ProgressCallbacks()
    silent.warn(FORGED)
    with silent.phase(FORGED):
        pass
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        f"warning: {plain}", plain, f"cacheblend-rag: {plain}", f"warning: {plain}"
    ]  # fmt: skip
    assert [line.strip() for line in told.out.splitlines() if "evil" in line] == [
        plain, f"name  {plain}"
    ]  # fmt: skip
    assert caplog.messages == [plain, plain]


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal of 80 columns is sent."""
    shown = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal nothing is drawn twice
    console = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(output, "side_console", lambda: console)
    return console


def test_a_terminal_shows_phases_tasks_and_notes_a_line_each(terminal):
    shown = terminal.file
    with output.progress_bar() as watcher:
        with watcher.phase("loading the model"):
            pass
        task = watcher.begin("files" * 30, 3)
        task.note("reading notes.txt" * 9)
        task.advance(2)
        deadline = time.monotonic() + 10
        while "2/3" not in shown.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)  # it is drawn a few times a second
        (line,) = terminal.render_lines(watcher._progress.get_renderable(), pad=False)
        watcher.warn("a\x1b[31m file\nskipped")
        task.end()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    for said in ("loading the model", "files", "2/3", "reading notes"):
        assert said in text
    assert "warning: a[31m file skipped" in text
    drawn = "".join(segment.text for segment in line)
    assert "2/3" in drawn
    assert len(drawn) <= 80


def test_without_a_terminal_long_work_is_told_in_lines(monkeypatch, capsys):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.02)
    seen = []

    def said(text):
        seen.append(capsys.readouterr().err)
        return text in "".join(seen)

    with output.progress_bar(lines=True) as watcher:
        with watcher.phase("loading the model"):
            assert until(lambda: said("loading the model\n"), 10)
        task = watcher.begin("files", 9)
        task.note("reading a.txt\nb")
        task.advance(3)
        inner = watcher.begin("a", 4)
        assert until(lambda: said("files 3/9, reading a.txt b; a 0/4\n"), 10)
        inner.end()
        task.end()
        watcher.warn("a file is skipped")
        assert said("warning: a file is skipped\n")
    with output.progress_bar() as watcher:
        watcher.begin("files", 9)
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
