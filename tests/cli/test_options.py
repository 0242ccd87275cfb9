from __future__ import annotations

import pytest
import typer

from cacheblend_rag.cli import options


def test_lists_of_values():
    assert options.names(" a, b ,,c") == ("a", "b", "c")
    assert options.numbers("0.05,.1", "--ratios") == (0.05, 0.1)
    assert options.layers("1,2", "--check-layers") == (1, 2)


@pytest.mark.parametrize("read", [options.numbers, options.layers])
def test_lists_of_numbers_refuse_words(read):
    with pytest.raises(typer.BadParameter, match="'one' must hold numbers"):
        read("one", "--x")


def test_layers_are_whole():
    with pytest.raises(typer.BadParameter, match="layer indices"):
        options.layers("1.5", "--x")
