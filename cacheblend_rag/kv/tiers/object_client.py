"""Asks an object store through obstore, whose own timeouts bound each answer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import numpy as np
from torch import Tensor

from cacheblend_rag.errors import MissingExtraError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.kv.tiers.bytes import room_for, tensor_of

NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
"""Servers' error for a missing bucket, which looks like the one for a missing object."""
TIMEOUT_SECONDS = 30.0
RETRIES = 1
"""Retries of a request that is throttled or broken off; then other tiers are asked."""
STREAMED_BYTES = 1 << 20
"""Bytes of an answer that are received at once."""
READ_AT_ONCE = 16
FORKED = (
    "object stores do not work in a process that was forked from one that had used them: start it "
    "anew (spawn; for vLLM's processes VLLM_WORKER_MULTIPROC_METHOD=spawn)"
)


class ObjectClient:
    """A store of obstore. Its methods raise OSError of one line, whatever goes wrong.

    used_in: the id of the process in which obstore was first used, and has its threads.
    """

    used_in: ClassVar[int | None] = None

    def __init__(self, store: Any) -> None:
        self.store = store

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask the store; its errors are raised as OSError."""
        from obstore.exceptions import BaseError

        ObjectClient.used_in = ObjectClient.used_in or os.getpid()
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            said = "there is no such bucket" if _tells_of_the_bucket(error) else _line(error)
            raise OSError(said) from error

    def get(self, path: str, options: Mapping[str, Any]) -> Any | None:
        """Return the store's answer, of which ``bytes_of`` reads the bytes; None without an object.

        To be called within ``asking``. options: of obstore, such as the range.
        """
        try:
            return self.store.get(path, options=options)
        except FileNotFoundError as error:
            if _tells_of_the_bucket(error):
                raise
            return None

    def read_many(self, paths: Sequence[str], most_bytes: int) -> list[bytes | OSError | None]:
        """Return whole objects; None for one that is not there, and errors in place.

        One that is larger than ``most_bytes`` is an error, and none holds all others up.
        """

        def whole(path: str) -> bytes | OSError | None:
            try:
                with self.asking():
                    found = self.get(path, {})
                    if found is None:
                        return None
                    nbytes = found.range[1] - found.range[0]
                    if not 0 <= nbytes <= most_bytes:
                        return OSError(f"{path} has {nbytes} bytes, of at most {most_bytes}")
                    return bytes(bytes_of(found, nbytes).numpy())
            except OSError as error:
                return error

        with ThreadPoolExecutor(READ_AT_ONCE, "objects") as pool:
            return list(pool.map(whole, paths))

    def pages(self, prefix: str | None = None) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield what obstore tells of objects, a page at a time.

        prefix: the folder they are in, at any depth.
        """
        pages = iter(self.store.list(prefix))
        while True:
            with self.asking():
                page = next(pages, None)
            if page is None:
                return
            yield page

    def put(
        self,
        path: str,
        parts: Sequence[bytes | memoryview],
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Write an object, in place of an older one."""
        with self.asking():
            self.store.put(path, parts, attributes=attributes, use_multipart=False)

    def delete(self, path: str) -> None:
        """Remove an object if it is there."""
        with self._if_there():
            self.store.delete(path)

    def rename(self, path: str, target: str) -> None:
        """Give an object another path if it is there."""
        with self._if_there():
            self.store.rename(path, target)

    @contextmanager
    def _if_there(self) -> Iterator[None]:
        with self.asking():
            try:
                yield
            except FileNotFoundError as error:
                if _tells_of_the_bucket(error):
                    raise


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
            retry_config={"max_retries": RETRIES, "retry_timeout": seconds},
            **options,
        )
    except BaseError as error:
        raise StoreError(f"{url}: {_line(error)}") from error


def bytes_of(found: Any, nbytes: int) -> Tensor:
    """Return the bytes of an answer of declared length; raises OSError for any other length.

    Memory is allocated as they arrive, and for no more than that, since the declared length may be
    wrong.
    """
    if nbytes == 0:
        return tensor_of(b"")
    raw, filled = room_for(nbytes), 0
    room = raw.numpy()
    for part in found.stream(min_chunk_size=STREAMED_BYTES):
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
