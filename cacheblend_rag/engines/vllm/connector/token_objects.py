"""The tokens of stored chunks in an object store, so that replicas with no other place share them.

Layout, in ``tokens/<model>/`` after the tier's prefix: objects that are written once, each with
chunks that one replica added and rows that it removed (token_segment.py), named by time and
replica; and ``id-<hex>``, by which readers see that the store lost them. Readers list the folder
every few seconds and read what is new; the order does not matter (token_rows.py). Small objects,
and those with removed chunks, are replaced by one that holds what is left of them (``to_merge``).

Anyone who can write to the store can write to these. So sizes are bounded before anything is read,
and what is read is checked, see stored_tokens.py; with a key (kv/mac.py), objects that were not
written with it are left out.
"""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from uuid import uuid4

from cacheblend_rag.engines.vllm.connector.stored_tokens import (
    MOST_TOKENS,
    Name,
    Row,
    StoredTokens,
)
from cacheblend_rag.engines.vllm.connector.token_rows import Kept, TokenRows, to_merge
from cacheblend_rag.engines.vllm.connector.token_segment import (
    OBJECT_BYTES,
    AddedRow,
    Segment,
    decode,
    encode,
    split,
)
from cacheblend_rag.kv.mac import mac_of
from cacheblend_rag.kv.tiers.object_client import ObjectClient
from cacheblend_rag.kv.tiers.urls import object_store
from cacheblend_rag.settings.tier_url import TierUrl

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""From one listing to the next: each is a request to pay for."""
MOST_SECONDS = 10.0
"""For one answer, unless the tier allows less: what is learned meanwhile waits."""
MANY = 100
"""Chunks added at once, before which is looked for what others have added just now."""
MOST_OBJECTS = 10_000
"""Of one model; merging keeps them far fewer."""
BATCH_OBJECTS, BATCH_BYTES = 32, 1 << 23
"""Read at the same time, unless a single one is larger."""
MOST_ROWS = 1 << 22
"""Rows of all objects that are known by their object, to see which ones to replace."""
OWN_SECONDS, OTHERS_SECONDS = 10.0, (60.0, 180.0)
"""Delay before objects are merged by the replica that wrote the oldest, and by any other one."""
TRIES, RETRY_SECONDS = 3, 600.0
"""Of reading an object, and the time after them, or after objects could not be replaced."""
_NAME = re.compile(r"[0-9a-f]{12}-[0-9a-f]{16}-[0-9a-f]{1,12}")
_ID = re.compile(r"id-[0-9a-f]{32}")


class ObjectTokens:
    """The chunks of one model in an object store, a TokenLog whose methods raise OSError.

    Raises MissingExtraError and StoreError as ``open_store``, and ConfigError as ``mac_of``; the
    store is not contacted.

    Args:
        url: the tier's.
        model: what the KV depends on beside tokens, namespace and lead-in, as a hash.
        read_only: whether nothing is replaced.
    """

    def __init__(self, url: TierUrl, model: str, *, read_only: bool = False) -> None:
        seconds = min(url.options.get("timeout") or MOST_SECONDS, MOST_SECONDS)
        self._client = ObjectClient(object_store(url, seconds))
        self._tier, self._folder, self._read_only = url.name, f"tokens/{model}/", read_only
        self._mac = mac_of()
        self._own, self._numbers = uuid4().hex[:16], count()
        self._rows = TokenRows()
        self._objects: dict[str, Kept] = {}
        self._copies: set[str] = set()
        self._to_merge: list[str] | None = []
        self._unusable: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._later: dict[str, float] = {}
        self._ids: set[str] = set()
        self._told: list[Mapping[Row, StoredTokens | None]] = []
        self._looked_at = -math.inf
        self._merges_at: float | None = None
        self._has_lost = self._has_discarded = self._has_warned = False

    def close(self) -> None:
        """Remove what was discarded from objects, if the store answers."""
        if self._has_discarded:
            with suppress(OSError):
                self._merge(to_merge(self._objects, self._rows.removed.keys(), self._copies))

    def add(self, stored: Sequence[StoredTokens], fresh: Collection[Name] = ()) -> bool:
        """Write chunks that are missing, as TokenLog says; ``news`` must have been called."""
        if len(stored) >= MANY:  # others may be adding them, too, when the store lost them
            self._look()
        missing = {
            one.name: one
            for one in stored
            if (one.name in fresh or not self._rows.of(one.name)) and len(one.tokens) <= MOST_TOKENS
        }
        added = [AddedRow(self._numbered(), one, name in fresh) for name, one in missing.items()]
        self._write(added, [row for name in missing for row in self._rows.of(name)])
        return True

    def discard(self, names: Collection[Name]) -> None:
        """Remove chunks, those that others have just added included."""
        self._look()
        rows = [row for name in names for row in self._rows.of(name)]
        self._write((), rows)
        self._has_discarded = self._has_discarded or bool(rows)

    def news(self) -> Iterator[Mapping[Row, StoredTokens | None]]:
        """Yield what was removed and added since the last call, as TokenLog says."""
        yield from self._taken()
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            yield from self._looked()
            self._tend()
            yield from self._taken()

    def has_lost(self) -> bool:
        """Return whether the store lost what it held, as TokenLog says."""
        lost, self._has_lost = self._has_lost, False
        return lost

    # Reading

    def _taken(self) -> Iterator[Mapping[Row, StoredTokens | None]]:
        """Yield what was read or written beside ``news``, once."""
        while self._told:
            yield self._told.pop(0)

    def _look(self) -> None:
        """Read what others have written, and keep it for ``news``."""
        for told in self._looked():
            self._told.append(told)

    def _looked(self) -> Iterator[Mapping[Row, StoredTokens | None]]:
        """List the objects, read new ones, and yield what they tell; raises OSError."""
        for name, data in self._read(self._new()):
            try:
                segment = decode(self._folder + name, data, self._mac)
            except ValueError as error:
                self._leave_out(name, str(error))
                continue
            yield self._take(name, segment, len(data))
        self._looked_at = time.monotonic()

    def _new(self) -> list[tuple[str, int]]:
        """Return the objects that are not read yet, in order, and their sizes."""
        listed: dict[str, int] = {}
        ids: set[str] = set()
        seen = 0
        for page in self._client.pages(self._folder):
            for meta in page:
                name = meta["path"].removeprefix(self._folder)
                if _NAME.fullmatch(name):
                    listed[name] = meta["size"]
                elif _ID.fullmatch(name):
                    ids.add(name)
            if (seen := seen + len(page)) > MOST_OBJECTS:
                raise OSError(f"{self._folder} has more than {MOST_OBJECTS} objects")
        if self._ids and not self._ids & ids:
            self._has_lost, self._rows, self._objects, self._copies = True, TokenRows(), {}, set()
        self._ids = ids
        if not self._objects.keys() <= listed.keys():
            self._objects = {name: kept for name, kept in self._objects.items() if name in listed}
            self._to_merge = None
        self._copies &= listed.keys()
        self._unusable &= listed.keys()
        now = time.monotonic()
        self._later = {name: at for name, at in self._later.items() if now < at}
        self._failures = Counter({name: n for name, n in self._failures.items() if name in listed})
        known = self._objects.keys() | self._unusable | self._later.keys()
        return sorted((name, size) for name, size in listed.items() if name not in known)

    def _read(self, listed: Sequence[tuple[str, int]]) -> Iterator[tuple[str, bytes]]:
        """Yield the objects that are there; raises OSError if none of several can be read.

        One that cannot be read, while others can, is left for later.
        """
        for batch in self._batches(listed):
            read = self._client.read_many([self._folder + name for name in batch], OBJECT_BYTES)
            told = dict(zip(batch, read, strict=True))
            errors = {name: data for name, data in told.items() if isinstance(data, OSError)}
            for name, error in errors.items():
                self._failures[name] += 1
                if self._failures[name] >= TRIES:
                    self._later[name] = time.monotonic() + RETRY_SECONDS
                    self._warn(name, f"cannot be read for now: {error}")
            if errors and len(errors) == len(batch) and not errors.keys() <= self._later.keys():
                raise next(iter(errors.values()))
            for name, data in told.items():
                if isinstance(data, bytes):
                    yield name, data

    def _batches(self, listed: Sequence[tuple[str, int]]) -> Iterator[list[str]]:
        batch: list[str] = []
        nbytes = 0
        for name, size in listed:
            if not 0 < size <= OBJECT_BYTES:
                self._leave_out(name, f"has {size} bytes")
                continue
            nbytes += size
            if batch and (len(batch) == BATCH_OBJECTS or nbytes > BATCH_BYTES):
                yield batch
                batch, nbytes = [], size
            batch.append(name)
        if batch:
            yield batch

    def _take(self, name: str, segment: Segment, size: int) -> Mapping[Row, StoredTokens | None]:
        self._to_merge = None
        held = sum(len(kept.rows) + len(kept.removed) for kept in self._objects.values())
        rows = frozenset(one.row for one in segment.added), frozenset(segment.removed)
        if self._rows.has_any(rows[0]):
            others = [other for other, kept in self._objects.items() if kept.rows & rows[0]]
            self._copies.update(others and [name, *others])
        self._objects[name] = Kept(size, *rows) if held < MOST_ROWS else Kept(size, is_held=False)
        return self._rows.take(segment)

    def _leave_out(self, name: str, reason: str) -> None:
        self._unusable.add(name)
        self._objects.pop(name, None)
        self._to_merge = None
        self._warn(name, reason)

    def _warn(self, name: str, reason: str) -> None:
        """Log why an object is left out, the first one as a warning."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        what = "an object with tokens of stored chunks is left out"
        logger.log(level, "%s tier: %s: %s%s %s", self._tier, what, self._folder, name, reason)

    # Writing

    def _numbered(self) -> str:
        return f"{self._own}-{next(self._numbers):x}"

    def _write(self, added: Sequence[AddedRow], removed: Sequence[str]) -> None:
        for segment in split(added, removed):
            if not self._ids:
                name = f"id-{uuid4().hex}"
                self._client.put(self._folder + name, [name.encode()])
                self._ids = {name}
            name = f"{time.time_ns() // 1_000_000:012x}-{self._numbered()}"
            data = encode(self._folder + name, segment, self._mac)
            self._client.put(self._folder + name, [data])
            self._told.append(self._take(name, segment, len(data)))

    # Replacing objects

    def _tend(self) -> None:
        """Replace objects where there is reason to, and it is this replica's turn."""
        if self._read_only:
            return
        if self._to_merge is None:
            self._to_merge = to_merge(self._objects, self._rows.removed.keys(), self._copies)
        names = self._to_merge
        if not names:
            self._merges_at, self._has_discarded = None, False
            return
        now = time.monotonic()
        if self._merges_at is None:
            is_own = self._has_discarded or names[0].split("-")[1] == self._own
            wait = OWN_SECONDS if is_own else random.uniform(*OTHERS_SECONDS)
            self._merges_at = now + wait
        if now < self._merges_at:
            return
        try:
            self._merge(names)
            self._merges_at = None
        except OSError as error:
            self._merges_at = time.monotonic() + RETRY_SECONDS
            what = "objects with tokens of stored chunks are not merged for now"
            logger.warning("%s tier: %s: %s", self._tier, what, error)

    def _merge(self, names: Sequence[str]) -> None:
        """Write what is left of some objects into new ones, and delete them; raises OSError."""
        self._client.delete(f"{self._folder}none")  # so that nothing is copied in vain
        self._to_merge = None
        added: list[AddedRow] = []
        removed: dict[str, None] = {}
        read = []
        for name, data in self._read([(name, self._objects[name].size) for name in names]):
            try:
                segment = decode(self._folder + name, data, self._mac)
            except ValueError as error:
                self._leave_out(name, str(error))
                continue
            read.append(name)
            added += segment.added
            removed.update((row, None) for row in segment.removed if row in self._rows.removed)
        left = self._rows.left(added)
        gone = {one.row for one in added} - {one.row for one in left} - self._rows.removed.keys()
        self._write(left, [*removed, *gone])
        for name in read:
            self._client.delete(self._folder + name)
            del self._objects[name]
