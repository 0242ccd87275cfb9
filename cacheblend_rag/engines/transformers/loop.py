"""One thread runs a model, for all engines around it, in steps: of prompts, and of answers.

Each request is a generator (``Work``) that runs in this thread. What it yields says what it needs
before it goes on: its turn among the prompts, what is being read for it, or a decode step, which is
run together with those of all other answers. Prompts take turns, a step each. Streams get a token
once those steps took as long as a decode step, after one step at least and four at most; whoever
wants a whole answer waits until the prompts that had come by then are prefilled, so that their
answers are decoded together. Idle work comes a step at a time from a thread that waits until no
request is there (``engines/lifetime.py``). Other threads wait for results, and never run the model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, finalize

import torch
from transformers import PreTrainedModel

from cacheblend_rag.blend.attention import without_cudnn
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.answer import MOST_TOGETHER
from cacheblend_rag.engines.lifetime import ITS_OWN_THREAD, working
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.transformers.ordinary_prefill import DecodeStep, run_steps
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.openmp import end_openmp_threads

PATIENCE_SECONDS = 0.05
"""Seconds between checks whether a request that waits for its chunks was cancelled."""
STALLED_SECONDS = 0.5
"""Seconds of waiting for its chunks after which no other request waits for a prompt."""
QUIET_SECONDS = 0.02
"""Seconds without a request after which the model is idle; who asks again pauses for less."""
MOST_STEPS = 4
"""Of prompts, between two tokens of a stream: a step on a GPU only begins work that goes on."""
END: Any = object()

T = TypeVar("T")


class Turn:
    """What a prompt with chunks needs first: that few others are being prefilled."""


Need: TypeAlias = Turn | DecodeStep | Sequence[Future[Any]]
"""What has to be there before work goes on; futures have to be done."""
Work: TypeAlias = Generator[Need, None, T]
"""Work in steps; it is resumed before its need is met once it is cancelled, which it must see."""
NOTHING: Need = ()


@dataclass(eq=False)
class _Task:
    """Work in the loop.

    streamed: whether its pieces are wanted as they come. is_idle: whether it is a step of idle
    work, which is no request. number: in the order of arrival. since: when its need came up.
    has_turn: whether it is one of the prompts that are prefilled at a time. behind: the number of
    the last prompt that had come when its own was prefilled.
    """

    work: Work[Any]
    cancel: Cancellation
    streamed: bool = False
    is_idle: bool = False
    done: Future[Any] = field(default_factory=Future)
    number: int = 0
    need: Need = NOTHING
    since: float = 0.0
    has_turn: bool = False
    behind: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether what it waits for has been read."""
        return all(future.done() for future in cast("Sequence[Future[Any]]", self.need))

    @property
    def is_stalled(self) -> bool:
        """Whether it waits so long for its chunks that no other request waits for it."""
        return not self.is_ready and monotonic() > self.since + STALLED_SECONDS


_loops: WeakKeyDictionary[PreTrainedModel, ModelLoop] = WeakKeyDictionary()
_loops_lock = threading.Lock()


def loop_of(model: PreTrainedModel) -> ModelLoop:
    """Return the loop of all engines around a model, whose thread ends with the model."""
    with _loops_lock:
        if (loop := _loops.get(model)) is None:
            loop = _loops[model] = ModelLoop()
            finalize(model, loop.stop)
        return loop


class ModelLoop:
    """The thread that runs a model; it begins with the first work.

    It refers to nothing of a model or an engine while it has no work of theirs.
    """

    def __init__(self) -> None:
        self._mail: SimpleQueue[_Task | None] = SimpleQueue()
        self._starting, self._is_over = threading.Lock(), False
        self._thread: threading.Thread | None = None
        # In the thread:
        self._came = self._requests = 0
        self._left_at = -QUIET_SECONDS
        self._queue, self._prompts = deque[_Task](), deque[_Task]()
        self._decoding: list[_Task] = []
        self._prefilling_took = self._decoding_took = 0.0
        self._steps = 0

    # For other threads

    def begin(
        self, work: Work[T], cancel: Cancellation, *, streamed: bool = False, idle: bool = False
    ) -> Future[T]:
        """Begin work; returns its result, once it is there.

        Args:
            work: is cancelled by ``cancel``.
            cancel: stops it.
            streamed: whether its pieces are wanted as they come.
            idle: whether it is a step of idle work, so that the model stays idle.

        Raises:
            ConfigError: in the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise ConfigError(ITS_OWN_THREAD)
        task = _Task(work, cancel, streamed, idle)
        task.done.set_running_or_notify_cancel()  # nobody can cancel it but by ``cancel``
        end_openmp_threads()  # of whoever waits, so that those of the model's thread may spin
        self._start()
        self._mail.put(task)
        return task.done

    def run(self, work: Work[T], cancel: Cancellation, *, idle: bool = False) -> T:
        """Return the result of work; interrupting the caller ends it."""
        done = self.begin(work, cancel, idle=idle)
        try:
            return done.result()
        except BaseException:
            cancel.set()
            wait([done])
            raise
        finally:
            del done  # whose error refers to this frame: a circle

    def call(self, step: Callable[[], T], *, idle: bool = False) -> T:
        """Run a function in the loop's thread and return its result; at once if called there."""
        if threading.current_thread() is self._thread:
            return step()
        return self.run(_single(step), Cancellation(), idle=idle)

    def each(self, items: Iterator[T], *, idle: bool = False) -> Iterator[T]:
        """Yield items, each made by a step, of idle work if ``idle``."""
        while (item := self.call(partial(next, items, END), idle=idle)) is not END:
            yield item

    def stepwise(self, work: Work[T]) -> Steps[T]:
        """Run idle work: a step each time this is resumed, while its need is met."""
        done: list[T] = []

        def to_end() -> Work[None]:
            done.append((yield from work))

        steps = to_end()
        try:
            for need in self.each(steps, idle=True):
                wanted = () if isinstance(need, Turn) else cast("Sequence[Future[Any]]", need)
                while wait(wanted, PATIENCE_SECONDS).not_done:
                    yield
                yield
        finally:
            self.call(steps.close, idle=True)
        return done[0]

    @property
    def is_idle(self) -> bool:
        """Whether no request is there, nor was a moment ago."""
        is_quiet = monotonic() >= self._left_at + QUIET_SECONDS
        return is_quiet and not self._requests and self._mail.empty()

    def stop(self) -> None:
        """End the thread; what it has not done is left."""
        self._is_over = True
        self._wake()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="cacheblend-model", daemon=True)
                thread.start()
                self._thread = thread

    def _wake(self, _: object = None) -> None:
        self._mail.put(None)

    # In the thread

    def _run(self) -> None:
        with torch.no_grad():
            while not self._is_over:
                with working(), without_cudnn():
                    did_something = self._turn()
                if not did_something:
                    self._wait()

    def _turn(self) -> bool:
        """Run a step of a prompt and a decode step, if there is one; returns whether there was."""
        self._receive()
        self._end_cancelled()
        self._give_turns()
        prompt = _taken_ready(self._prompts)
        if prompt is not None:
            began = monotonic()
            self._advance(prompt)
            self._prefilling_took += monotonic() - began
            self._steps += 1
        if self._decoding and (prompt is None or self._must_decode()):
            self._decode()
            return True
        return prompt is not None

    def _wait(self) -> None:
        """Wait for mail, and no longer than until something may have to be done."""
        with suppress(Empty):
            self._take(self._mail.get(timeout=PATIENCE_SECONDS if self._requests else None))

    def _receive(self) -> None:
        while not self._mail.empty():
            self._take(self._mail.get())

    def _take(self, task: _Task | None) -> None:
        if task is not None:
            self._came += 1
            self._requests += not task.is_idle
            task.number = self._came
            self._place(task)

    def _place(self, task: _Task) -> None:
        """Let a task wait for what it needs."""
        need, task.since = task.need, monotonic()
        if isinstance(need, Turn):
            self._queue.append(task)
        elif isinstance(need, DecodeStep):
            if task.behind is None:
                task.behind, task.has_turn = self._came, False
            self._decoding.append(task)
        else:
            self._prompts.append(task)
            for future in need:
                if not future.done():
                    future.add_done_callback(self._wake)

    def _give_turns(self) -> None:
        """Let the next prompts begin, as long as few enough are prefilled at a time."""
        begun = sum(task.has_turn and not task.is_stalled for task in self._prompts)
        for _ in range(min(MOST_TOGETHER - begun, len(self._queue))):
            task = self._queue.popleft()
            task.has_turn, task.need = True, NOTHING
            self._prompts.append(task)

    def _end_cancelled(self) -> None:
        """Resume requests that are cancelled, whatever they need."""
        for waiting in (self._prompts, self._decoding, self._queue):
            for task in [task for task in waiting if task.cancel.is_set()]:
                waiting.remove(task)
                self._advance(task)

    def _must_decode(self) -> bool:
        """Whether an answer must not wait any longer for prompts to be prefilled."""
        if self._prefilling_took < self._decoding_took and self._steps < MOST_STEPS:
            return False
        at_work = [task for task in self._prompts if not task.is_stalled]
        oldest = min((task.number for task in (*at_work, *self._queue)), default=0)
        return any(task.streamed or (task.behind or 0) < oldest for task in self._decoding)

    def _decode(self) -> None:
        """Run one decode step for all answers that are being decoded."""
        began, decoding, self._decoding = monotonic(), self._decoding, []
        run_steps([task.need for task in decoding if isinstance(task.need, DecodeStep)])
        for task in decoding:
            self._advance(task)
        self._prefilling_took, self._steps = 0.0, 0
        self._decoding_took = monotonic() - began

    def _advance(self, task: _Task) -> None:
        """Run work up to what it needs next, or to its end."""
        task.need = NOTHING  # so that nothing here holds the KV of work that fails
        try:
            task.need = next(task.work)
        except StopIteration as done:
            self._leave(task)
            task.done.set_result(done.value)
        except BaseException as error:
            self._leave(task)
            # Without this frame, whose task holds the error: that would be a circle.
            own = cast(TracebackType, error.__traceback__)
            task.done.set_exception(error.with_traceback(own.tb_next))
            del own
        else:
            self._place(task)

    def _leave(self, task: _Task) -> None:
        if not task.is_idle:
            self._requests, self._left_at = self._requests - 1, monotonic()


def _taken_ready(tasks: deque[_Task]) -> _Task | None:
    """Take the first task whose need is met; those before it go behind the others."""
    for _ in range(len(tasks)):
        task = tasks.popleft()
        if task.is_ready:
            return task
        tasks.append(task)
    return None


def _single(step: Callable[[], T]) -> Work[T]:
    """Return work of a single step."""
    yield from ()
    return step()
