from __future__ import annotations

import json
import sys

import pytest
import typer

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


def test_lists_of_values():
    assert output.names(" a, b ,,c") == ("a", "b", "c")
    assert output.numbers("0.05,.1", "--ratios") == (0.05, 0.1)
    assert output.layers("1,2", "--check-layers") == (1, 2)


@pytest.mark.parametrize("read", [output.numbers, output.layers])
def test_lists_of_numbers_refuse_words(read):
    with pytest.raises(typer.BadParameter, match="'one' must hold numbers"):
        read("one", "--x")


def test_layers_are_whole():
    with pytest.raises(typer.BadParameter, match="layer indices"):
        output.layers("1.5", "--x")


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


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.00 GiB")],
)
def test_sizes_carry_their_unit(nbytes, text):
    assert output.size(nbytes) == text


def test_terminals_are_sent_no_control_characters():
    assert output.printable("a\x1b[31mred\x07\r\n\ttab \x9b1m") == "a[31mred\n\ttab 1m"
