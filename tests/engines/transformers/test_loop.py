"""The thread that runs a model, by itself: what it runs when, who waits, and how it ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Event, Thread
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.transformers import loop as loop_module
from cacheblend_rag.engines.transformers.loop import NOTHING, ModelLoop, Turn, Work, loop_of
from cacheblend_rag.engines.transformers.ordinary_prefill import DecodeStep
from cacheblend_rag.errors import ConfigError

PATIENCE = 60.0
NEVER: Future[Any] = Future()


class Alone:
    """How a model decodes that takes one text at a time; fails after a token -1."""

    stack = None
    decodes_batches = False

    def decode(self, cache: object, token_ids: Sequence[int]) -> Tensor:
        if token_ids[-1] == -1:
            raise OSError("no logits")
        return torch.tensor([[float(token_ids[-1])]])


@pytest.fixture
def loop() -> Iterator[ModelLoop]:
    loop = ModelLoop()
    yield loop
    loop.stop()


@contextmanager
def standing_still(loop: ModelLoop) -> Iterator[None]:
    """Let a loop do nothing while work comes, so that all of it is there at once."""
    begun, go_on = Event(), Event()

    def stand() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    thread = Thread(target=loop.call, args=(stand,))
    thread.start()
    assert begun.wait(PATIENCE)
    try:
        yield
    finally:
        go_on.set()
        thread.join(PATIENCE)


def prompt(log: list[str], name: str, steps: int, *needs: Any) -> Work[str]:
    """Needs what it needs, then so many steps."""
    yield from needs
    for _ in range(steps):
        log.append(name)
        yield NOTHING
    return name


def answer(log: list[str], name: str, steps: int, tokens: int) -> Work[list[int]]:
    """A prompt of so many steps, then an answer of so many tokens."""
    yield from prompt(log, name, steps)
    ids = [0]
    for token in range(1, tokens + 1):
        step = DecodeStep(Alone(), None, ids)
        yield step
        assert step.take().item() == ids[-1]
        log.append(name.upper())
        ids.append(token)
    return ids


def begun(loop: ModelLoop, *works: Work[Any], **options: Any) -> list[Future[Any]]:
    with standing_still(loop):
        return [loop.begin(work, Cancellation(), **options) for work in works]


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    return [one.result(PATIENCE) for one in futures]


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock take a second: a step of a prompt two, one of n answers n + 1."""
    monkeypatch.setattr(loop_module, "monotonic", partial(next, count()))


@pytest.mark.usefixtures("ticking")
def test_prompts_take_turns_and_a_stream_gets_a_token_after_each(loop: ModelLoop) -> None:
    log: list[str] = []
    with standing_still(loop):
        stream = loop.begin(answer(log, "s", 0, 4), Cancellation(), streamed=True)
        others = [loop.begin(prompt(log, name, 2), Cancellation()) for name in "ab"]
    assert stream.result(PATIENCE) == [0, 1, 2, 3, 4]
    assert results(others) == ["a", "b"]
    assert "".join(log) == "SaSbSaSb"


def test_a_few_prompts_with_chunks_begin_at_a_time(
    loop: ModelLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "MOST_TOGETHER", 1)
    log: list[str] = []
    works = [prompt(log, name, 2, Turn()) for name in "abc"]
    results(begun(loop, *works, prompt(log, "x", 1)))
    assert "".join(log).replace("x", "") == "aabbcc"
    assert log.index("x") < 3, "without chunks there is no turn to wait for"


@pytest.mark.parametrize("need", ["turn", "read", "decode"])
def test_cancelled_work_is_resumed_whatever_it_waits_for(
    loop: ModelLoop, monkeypatch: pytest.MonkeyPatch, need: str
) -> None:
    monkeypatch.setattr(loop_module, "MOST_TOGETHER", 0)
    cancel, waits = Cancellation(), Event()

    def work() -> Work[str]:
        waits.set()
        if need == "decode":
            yield DecodeStep(Alone(), None, [-1])
        else:
            yield Turn() if need == "turn" else [NEVER]
        return "ended"

    done = loop.begin(work(), cancel)
    assert waits.wait(PATIENCE)
    cancel.set()
    assert done.result(PATIENCE) == "ended"


def test_an_error_is_of_the_work_that_raised_it(loop: ModelLoop) -> None:
    log: list[str] = []

    def exits() -> Work[None]:
        yield NOTHING
        raise SystemExit

    def finds_no_logits() -> Work[Tensor]:
        step = DecodeStep(Alone(), None, [-1])
        yield step
        return step.take()

    bad, worse, good = begun(loop, finds_no_logits(), exits(), answer(log, "g", 2, 3))
    with pytest.raises(OSError, match="no logits"):
        bad.result(PATIENCE)
    with pytest.raises(SystemExit):
        worse.result(PATIENCE)
    assert good.result(PATIENCE) == [0, 1, 2, 3]


def test_its_own_thread_runs_a_step_and_does_not_wait_for_itself(loop: ModelLoop) -> None:
    assert loop.call(lambda: loop.call(threading.current_thread)).name == "cacheblend-model"
    assert list(loop.each(iter("abc"))) == ["a", "b", "c"]

    def ask() -> None:
        with pytest.raises(ConfigError, match="in the thread that makes its answers"):
            loop.begin(prompt([], "p", 1), Cancellation())

    loop.call(ask)


def test_the_thread_ends_with_the_model() -> None:
    model: Any = nn.Linear(1, 1)
    loop = loop_of(model)
    assert loop_of(model) is loop
    thread = loop.call(threading.current_thread)
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()
