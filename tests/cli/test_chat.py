from __future__ import annotations

import os
import re
import signal

import pytest
from typer.testing import CliRunner

from cacheblend_rag.cli.main import app
from cacheblend_rag.engines.transformers import TransformersEngine

REMARK = re.compile(r"(\d+) passages, (\d+) earlier turns, ([\d,]+) of ([\d,]+) tokens reused")


@pytest.fixture
def chat(indexed):
    """Pipe lines into ``chat``."""

    def run(*lines, options=()):
        arguments = ["ask", "--from", str(indexed[0]), *map(str, options)]
        result = CliRunner().invoke(app, arguments, input="\n".join(lines))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.stderr
        return result

    return run


def remarks(result):
    """(passages, earlier turns, reused tokens, all tokens) of each answer."""
    return [
        tuple(int(n.replace(",", "")) for n in found) for found in REMARK.findall(result.stderr)
    ]


def test_each_line_is_a_question_and_stdout_holds_the_answers(chat, indexed):
    asked = indexed[1][:2]
    lines = [line for item in asked for line in (item.question, "", "/reset")]
    result = chat(*lines, options=["--set", "recompute_ratio=0"])
    assert result.stdout.splitlines() == [item.answer for item in asked]
    assert [turns for _, turns, *_ in remarks(result)] == [0, 0]


def test_commands_tell_of_the_last_answer(chat, indexed):
    result = chat(
        "/sources", indexed[1][0].question, "/sources", "/report", "/nonsense", "/exit", "Never?"
    )
    lines = result.stdout.splitlines()
    assert sum("notes/" in line for line in lines) == 4
    assert any("passages: 4 reused from disk" in line for line in lines)
    assert "nothing was asked yet" in result.stderr
    assert "/nonsense is not a command" in result.stderr
    assert len(remarks(result)) == 1


def test_a_follow_up_is_searched_for_with_the_question_before(chat):
    result = chat("What is the job of Nora Keller?", "And her instrument?", "/sources")
    *_, first, second, _, _ = result.stdout.splitlines()
    assert "nora-keller" in first
    assert "nora-keller" in second


def test_an_error_ends_the_turn_not_the_program(chat, indexed):
    result = chat("Who? " * 5000, indexed[1][0].question)
    assert "warning: This model's maximum context length is" in result.stderr
    assert result.stdout.strip() == indexed[1][0].answer


def test_ctrl_c_stops_the_answer_not_the_program(chat, indexed, monkeypatch):
    whole = TransformersEngine.stream

    def interrupted(engine, prompt, sampling, **options):
        sampling = sampling.with_changes(ignore_eos=True, max_tokens=200)
        for number, delta in enumerate(whole(engine, prompt, sampling, **options)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield delta

    monkeypatch.setattr(TransformersEngine, "stream", interrupted)
    # A process that was started in the background may have been told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = chat(indexed[1][0].question, "/report", indexed[1][1].question)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)  # outside of an answer it interrupts again
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(remarks(result)) == 2
    assert result.stderr.count("stopped") == 2
    assert result.stdout.startswith(indexed[1][0].answer)


def test_sampling_options_reach_each_answer(chat, indexed, drawn_with):
    questions = [item.question for item in indexed[1][:2]]
    given = ("max_tokens=4", "top_p=0.7", "seed=3")
    chat(*questions, options=[part for one in given for part in ("--set", one)])
    assert [(one.top_p, one.seed, one.max_tokens) for one in drawn_with] == [(0.7, 3, 4)] * 2
    assert {(one.temperature, one.repetition_penalty) for one in drawn_with} == {(5.0, 3.0)}


def test_a_conversation_goes_on_from_its_file(chat, indexed, tmp_path):
    questions = [item.question for item in indexed[1][:3]]
    talk = tmp_path / "talk.json"
    first = chat(*questions[:2], options=["--set", "recompute_ratio=0", "--resume", talk])
    again = chat(questions[2], "/report", options=["--set", "recompute_ratio=0", "--resume", talk])
    assert [turns for _, turns, *_ in remarks(first)] == [0, 1]
    assert [turns for _, turns, *_ in remarks(again)] == [2]
    assert "parts of earlier turns: " in again.stdout
    assert "reused from disk" in again.stdout.partition("parts of earlier turns: ")[2]
    chat("/reset", options=["--resume", talk])
    anew = chat(questions[0], options=["--set", "recompute_ratio=0", "--resume", talk])
    assert [turns for _, turns, *_ in remarks(anew)] == [0]
    talk.write_text("{}")
    refused = CliRunner().invoke(app, ["ask", "--from", str(indexed[0]), "--resume", str(talk)])
    assert refused.exit_code == 2
    assert "not a saved conversation" in refused.stderr
