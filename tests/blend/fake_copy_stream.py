"""A fake device whose copies come as late as they may, and which notes wrong ordering.

The compute stream is the CPU itself, which works at once. Work for the copy stream waits in a queue
until somebody waits for an event behind it, or has asked in vain often enough. Each copy knows its
source by a weak reference only, and each place of a buffer who used it last, and whether the other
stream has waited for that.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cacheblend_rag.blend.copy_stream import CopyStream, PinnedBuffers
from cacheblend_rag.blend.fused import FusedKV


class AtOnce(Executor):
    """Stands for a thread that has done its work by the time it is looked at."""

    def submit(self, work: Any, /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*given, **named))
        except BaseException as error:
            future.set_exception(error)
        return future


@dataclass
class FakeEvent:
    """number: of the copy stream's tasks, or of what the work's stream did so far."""

    copy_stream: FakeCopyStream
    number: int
    is_of_work: bool = False

    def query(self) -> bool:
        with self.copy_stream.lock:
            is_past = self.is_of_work or self.copy_stream.done >= self.number
            if not is_past:
                self.copy_stream.be_asked()
            return is_past

    def synchronize(self) -> None:
        self.copy_stream.waited_in.append(threading.current_thread().name)
        with self.copy_stream.lock:
            self.copy_stream.run_until(self.number)


class FakeCopyStream(CopyStream):
    """See the module. errors: what was out of order. waited_in: threads that had to wait.

    patience: how often it is asked in vain until it does a task; None is forever.
    """

    def __init__(self, patience: int | None = 3) -> None:
        self._patience, self._asked_in_vain = patience, 0
        self.lock = threading.RLock()
        self.errors: list[str] = []
        self.waited_in: list[str] = []
        self.asked = self.done = 0
        self.made: list[Tensor] = []
        self._tasks: deque[Callable[[], object]] = deque()
        self._pinned: set[int] = set()
        self._here: set[int] = set()
        self._shared: set[int] = set()
        self._worked = self._lane_knows = self._work_knows = 0
        self._by_work: dict[tuple[int, int], int] = {}
        self._by_lane: dict[tuple[int, int], int] = {}
        self._buffers: dict[int, FusedKV] = {}
        self.is_on_lane = False

    # What a copy_stream is asked

    def pinned(self, nbytes: int) -> Tensor:
        return self.pin(self._make(nbytes))

    def scratch(self, nbytes: int) -> Tensor:
        return self._make(nbytes)

    def has(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._here

    def is_pinned(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._pinned

    def worked(self) -> FakeEvent:
        return FakeEvent(self, self._worked, is_of_work=True)

    def carried(self) -> FakeEvent:
        return FakeEvent(self, self.asked)

    def follow(self, event: FakeEvent) -> None:
        def wait() -> None:
            self._lane_knows = max(self._lane_knows, event.number)

        assert event.is_of_work
        self._ask(wait)

    def hold_work(self, event: FakeEvent) -> None:
        assert not event.is_of_work
        with self.lock:
            self.run_until(event.number)
            self._work_knows = max(self._work_knows, event.number)

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        assert into.is_contiguous()
        assert tensor.is_contiguous()
        assert self.is_pinned(into) or self.is_pinned(tensor), "only such copies do not block"
        storage = weakref.ref(tensor.untyped_storage())
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        dtype = tensor.dtype

        def late() -> None:
            there = storage()
            if there is None:
                self.errors.append("the source of a copy was let go of")
            else:
                into.copy_(torch.empty(0, dtype=dtype).set_(there, *layout))

        self._ask(late)

    def run(self, work: Callable[[], object]) -> None:
        def late() -> None:
            self.is_on_lane = True
            with _Seen(self):
                work()
            self.is_on_lane = False

        self._ask(late)

    def share(self, *tensors: Tensor) -> None:
        self._shared.update(_storage(tensor) for tensor in tensors)

    # What tests ask

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(_storage(tensor))
        return tensor

    def put_here(self, tensor: Tensor) -> Tensor:
        """Have a tensor lie on the device."""
        self._here.add(_storage(tensor))
        return tensor

    def be_asked(self) -> None:
        self._asked_in_vain += 1
        if self._patience is not None and self._asked_in_vain % self._patience == 0:
            self.run_until(self.done + 1)

    def run_until(self, number: int) -> None:
        while self.done < min(number, self.asked):
            self.done += 1
            self._tasks.popleft()()

    def finish(self) -> None:
        with self.lock:
            self.run_until(self.asked)

    def watch(self, monkeypatch: Any) -> None:
        """Note what the work's stream does with each layer's place in a buffer."""
        own = FusedKV.of_layer

        def of_layer(fused: FusedKV, layer: int) -> tuple[Tensor, Tensor]:
            keys, values = own(fused, layer)
            if not self.is_on_lane:
                self._note_work(fused, layer, _place_in(fused.keys, keys))
            return keys, values

        monkeypatch.setattr(FusedKV, "of_layer", of_layer)

    def saw(self, tensor: Tensor, made: set[int]) -> None:
        """Note what the copy stream does with a tensor."""
        storage = _storage(tensor)
        for fused in self._buffers.values():
            for whole in (fused.keys, fused.values):
                if storage == _storage(whole):
                    self._note_lane(fused, _place_in(whole, tensor))
        known = self._shared | self._pinned | made
        if storage not in known | {_storage(each) for each in self.made}:
            self.errors.append(
                f"{tuple(tensor.shape)} is used on the copy stream and not shared with it"
            )

    def _note_work(self, fused: FusedKV, layer: int, where: int) -> None:
        with self.lock:
            self._buffers[id(fused)] = fused
            place = id(fused), where
            self._worked += 1
            self._by_work[place] = self._worked
            if self._by_lane.get(place, 0) > self._work_knows:
                self.errors.append(f"work in layer {layer} has not waited for the copy stream")

    def _note_lane(self, fused: FusedKV, where: int) -> None:
        place = id(fused), where
        self._by_lane[place] = self.done
        if self._by_work.get(place, 0) > self._lane_knows:
            self.errors.append(f"the copy stream uses place {where} before work is through with it")

    def _make(self, nbytes: int) -> Tensor:
        self.made.append(torch.full((nbytes,), 0xFF, dtype=torch.uint8))
        return self.made[-1]

    def _ask(self, task: Callable[[], object]) -> None:
        with self.lock:
            self.asked += 1
            self._tasks.append(task)


class _Seen(TorchDispatchMode):
    """Notes which tensors operations on the copy stream use."""

    def __init__(self, copy_stream: FakeCopyStream) -> None:
        super().__init__()
        self._copy_stream = copy_stream
        self._made: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = {_storage(each) for each in self._made}
        out = function(*args, **(kwargs or {}))
        new = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        # In inference mode `to` arrives here whole, which may be a view or a copy.
        if function.is_view and {*map(_storage, new)} <= {*map(_storage, given)}:
            return out
        for each in given:
            self._copy_stream.saw(each, made)
        self._made += new
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def use(monkeypatch: Any, buffers: PinnedBuffers | None) -> None:
    """Have passes take these buffers, whatever their device; none: copy plainly."""
    for module in ("blend.transfer", "prefill.chunk_loader", "prefill.precompute"):
        monkeypatch.setattr(f"cacheblend_rag.{module}.pinned_buffers_of", lambda _: buffers)


def _place_in(whole: Tensor, part: Tensor) -> int:
    """Which layer's place in a buffer a part of it is, or is in."""
    step = whole.stride(0) * whole.element_size()
    return (part.data_ptr() - whole.data_ptr()) // step
