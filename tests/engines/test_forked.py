"""An engine in a process that was forked says that it does not work there, and holds nobody up."""

import os

import pytest

from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer


@pytest.fixture
def toy():
    engine = ToyEngine(make_tokenizer())
    yield engine
    engine.close()


def told_by(ask):
    """What a forked process says when it does ``ask``: what it returns, or the error's name."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            told = repr(ask())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return told


ASK = {
    "generate": lambda engine: engine.generate("A question?"),
    "stream": lambda engine: list(engine.stream("A question?")),
    "precompute": lambda engine: engine.precompute(["A text."], progress=False),
}


@pytest.mark.parametrize("how", ASK)
def test_a_forked_engine_says_so_in_a_line(how, toy):
    told = told_by(lambda: ASK[how](toy))
    assert told.startswith(f"ConfigError: the engine was opened in process {os.getpid()}, ")
    assert "open an engine in process" in told
    assert "\n" not in told
    toy.generate("A question?")


def test_a_forked_engine_is_closed_at_once(toy):
    assert told_by(toy.close) == "None"
    assert toy.is_open
