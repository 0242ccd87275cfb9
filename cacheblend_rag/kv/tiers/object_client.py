"""Asks an object store, through obstore, within a deadline for each answer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from torch import Tensor

from cacheblend_rag.errors import MissingExtraError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.kv.tiers.bytes import room_for, tensor_of

T = TypeVar("T")

NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
"""Servers' error for a missing bucket, which looks like the one for a missing object."""
TIMEOUT_SECONDS = 30.0
RETRIES = 1
"""Retries of a request that is throttled or broken off; then other tiers are asked."""
STREAMED_BYTES = 1 << 20
"""Bytes of an answer that are received at once."""
FORKED = (
    "object stores do not work in a process that was forked from one that had used them: start it "
    "anew (spawn; for vLLM's processes VLLM_WORKER_MULTIPROC_METHOD=spawn)"
)


class ObjectClient:
    """A store of obstore whose answers are waited for up to a deadline.

    Its methods raise OSError of one line, whatever goes wrong.

    store: of obstore. seconds: for one whole answer. name: of the thread that waits. used_in: the
    id of the process in which obstore was first used, and has its threads.
    """

    used_in: ClassVar[int | None] = None

    def __init__(self, store: Any, seconds: float, name: str) -> None:
        self.store, self._seconds = store, seconds
        self._loop = LoopThread(name)

    def close(self) -> None:
        """End the thread that waits for answers."""
        self._loop.close()

    def answer(self, asked: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine of obstore."""
        from obstore.exceptions import BaseError

        try:
            return self._result(asked, self._seconds)
        except (BaseError, FileNotFoundError) as error:
            said = "there is no such bucket" if _tells_of_the_bucket(error) else _line(error)
            raise OSError(said) from error

    async def get(self, path: str, options: Mapping[str, Any]) -> Any | None:
        """Return the store's answer, to be waited for by ``answer``; None without such an object.

        options: of obstore, such as the range.
        """
        try:
            return await self.store.get_async(path, options=options)
        except FileNotFoundError as error:
            if _tells_of_the_bucket(error):
                raise
            return None

    def read_many(self, paths: Sequence[str], most_bytes: int) -> list[bytes | OSError | None]:
        """Return whole objects; None for one that is not there, and errors in place.

        One that is late or larger than ``most_bytes`` is an error, and holds no other up.
        """
        asked = _all(self._whole(path, most_bytes) for path in paths)
        return self._result(asked, self._seconds + 1)  # each ends before

    def _result(self, asked: Coroutine[Any, Any, T], seconds: float) -> T:
        ObjectClient.used_in = ObjectClient.used_in or os.getpid()
        return self._loop.result(asked, seconds)

    async def _whole(self, path: str, most_bytes: int) -> bytes | OSError | None:
        from obstore.exceptions import BaseError

        try:
            async with asyncio.timeout(self._seconds):
                found = await self.get(path, {})
                if found is None:
                    return None
                nbytes = found.range[1] - found.range[0]
                if not 0 <= nbytes <= most_bytes:
                    return OSError(f"{path} has {nbytes} bytes, of at most {most_bytes}")
                return bytes((await bytes_of(found, nbytes)).numpy())
        except TimeoutError:
            return OSError(f"the whole answer did not arrive within {self._seconds:g} s")
        except (BaseError, OSError) as error:
            return OSError(_line(error))

    def pages(self, prefix: str | None = None) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield what obstore tells of objects, a page at a time.

        prefix: the folder they are in, at any depth.
        """
        pages = self.store.list(prefix)
        while (page := self.answer(_next(pages))) is not None:
            yield page

    def put(
        self,
        path: str,
        parts: Sequence[bytes | memoryview],
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Write an object, in place of an older one."""
        options = {"attributes": attributes, "use_multipart": False}
        self.answer(_done(partial(self.store.put_async, path, parts, **options)))

    def delete(self, path: str) -> None:
        """Remove an object if it is there."""
        self.answer(_done(partial(self.store.delete_async, path), may_be_gone=True))

    def rename(self, path: str, target: str) -> None:
        """Give an object another path if it is there."""
        self.answer(_done(partial(self.store.rename_async, path, target), may_be_gone=True))


def open_store(url: str, *, timeout_seconds: float | None = None, **options: Any) -> Any:
    """Return obstore's store for a URL; its credentials come from the environment.

    Raises MissingExtraError without the library, StoreError when it knows no such store, or in a
    process that was forked from one that had used obstore: its threads exist there only.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise MissingExtraError("an object store", "object-store") from error
    if ObjectClient.used_in not in {None, os.getpid()}:
        raise StoreError(f"{url}: {FORKED}")
    seconds = timedelta(seconds=timeout_seconds or TIMEOUT_SECONDS)
    if url.startswith("memory:"):
        return from_url(url)
    if url.startswith("file:"):
        make_folder(unquote(urlsplit(url).path))
        return from_url(url, mkdir=True)
    is_plain = str(options.get("endpoint", "")).startswith("http://")
    try:
        return from_url(
            url,
            client_options={"timeout": seconds, "connect_timeout": seconds, "allow_http": is_plain},
            retry_config={"max_retries": RETRIES, "retry_timeout": 2 * seconds},
            **options,
        )
    except BaseError as error:
        raise StoreError(f"{url}: {_line(error)}") from error


async def _done(begin: Callable[[], Any], *, may_be_gone: bool = False) -> None:
    """Run work of obstore on a loop, and wait for it.

    may_be_gone: whether a missing object is no error.
    """
    try:
        await begin()
    except FileNotFoundError as error:
        if not may_be_gone or _tells_of_the_bucket(error):
            raise


async def _all(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return await asyncio.gather(*asked)


async def _next(pages: Any) -> Any:
    """Return the next page of a listing, None after the last one."""
    async for page in pages:
        return page
    return None


async def bytes_of(found: Any, nbytes: int) -> Tensor:
    """Return the bytes of an answer of declared length; raises OSError for any other length.

    Memory is allocated as they arrive, and for no more than that, since the declared length may be
    wrong.
    """
    if nbytes == 0:
        return tensor_of(b"")
    raw, filled = room_for(nbytes), 0
    room = raw.numpy()
    async for part in found.stream(min_chunk_size=STREAMED_BYTES):
        if filled + len(part) > nbytes:
            raise OSError(f"the store sends more than the {nbytes} bytes of its answer")
        room[filled : filled + len(part)] = np.frombuffer(part, dtype=np.uint8)
        filled += len(part)
    if filled < nbytes:
        raise OSError(f"{filled} of {nbytes} bytes were sent")
    return raw


def _tells_of_the_bucket(error: BaseException) -> bool:
    return any(name in str(error) for name in NO_BUCKET)


def _line(error: BaseException) -> str:
    """Return an error's message, without its debugging details."""
    return " ".join(str(error).partition("\n\n")[0].split())


class LoopThread:
    """Runs coroutines for other threads, and cancels them at their deadline.

    So nothing is left behind: the caller continues, and the cancelled request's connection is
    closed. The thread starts with the first coroutine and ends with ``close``.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def result(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the result of ``work``, or raise its error; OSError after the deadline."""
        try:
            loop = self._started()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(_within(work, seconds), loop)
        try:
            return future.result()
        finally:
            future.cancel()  # the waiting thread may be interrupted

    def close(self) -> None:
        """End the thread; later work starts another one."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    loop.close()
                    raise OSError(str(error)) from error
                self._loop = loop
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
    finally:
        loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise OSError(f"the whole answer did not arrive within {seconds:g} s") from error
