"""The tokens of stored chunks in Redis, so that replicas without a common folder share them.

Layout, after the tier's prefix and ``tokens:<model>:``: the stream ``chunks`` has an entry for each
chunk, the stream ``removals`` the entries that were removed since, and the hash ``names`` the entry
of each name; its field ``""`` is an id of the three, by which readers see that the server lost
them. Streams number their entries in order, so a reader asks for those behind the last one it has.

Anyone who can write to the server can write to these. So the server itself leaves out what is too
large before it sends anything, and what it sends is checked, see stored_tokens.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from cacheblend_rag.engines.vllm.connector.stored_tokens import (
    MOST_TOKENS,
    Name,
    Row,
    StoredTokens,
    TokenRoom,
    checked,
)
from cacheblend_rag.kv.tiers.redis import PREFIX, TIMEOUT_SECONDS, asking, connect
from cacheblend_rag.kv.tiers.urls import redis_place
from cacheblend_rag.settings.tier_url import TierUrl

KEPT_REMOVALS = 100_000
"""Removals that other engines may still have to read."""
ROWS_AT_ONCE = 1024
ROW_BYTES = 4 * MOST_TOKENS + 1024
"""Of a chunk's entry, at most; larger ones are left out."""
PAGE_BYTES = 2 << 20
"""Of entries read or written at once, unless a single one is larger."""
ANSWER_BYTES = 2 * ROW_BYTES
"""Most bytes of all answers that one operation takes."""
SECONDS_AT_ONCE = 5.0
"""After which the rest of the news is left for the next look."""
START = (0, 0)

_HELD = """
local function held(name)
  local row = redis.call('HGET', KEYS[3], name)
  if not row then return false end
  local found = redis.pcall('XRANGE', KEYS[1], row, row, 'COUNT', 1)
  return not found.err and found[1] and found[1][2][2] == name and row
end
local function remove(row, kept)
  redis.call('XDEL', KEYS[1], row)
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', kept, '*', 'row', row)
end
"""
ADD = f"""{_HELD}
if redis.call('HSETNX', KEYS[3], '', ARGV[6]) == 1 then redis.call('UNLINK', KEYS[1], KEYS[2]) end
local row = held(ARGV[1])
if row and ARGV[4] == '0' then return 0 end
if row then remove(row, ARGV[5]) end
row = redis.call('XADD', KEYS[1], '*', 'name', ARGV[1], 'follows', ARGV[2], 'tokens', ARGV[3])
redis.call('HSET', KEYS[3], ARGV[1], row)
return 1
"""
"""Adds a chunk: its name, follows, tokens, whether as a new one, KEPT_REMOVALS, an id."""
# If memory is full, a script may not begin with a command that could take more.
DISCARD = f"""{_HELD}
local row = held(ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if row then remove(row, ARGV[2]) end
return row and 1 or 0
"""
"""Removes a chunk: its name, KEPT_REMOVALS."""
LACKING = f"""{_HELD}
local lacking = {{}}
for place, name in ipairs(ARGV) do if not held(name) then lacking[#lacking + 1] = place end end
return lacking
"""
"""Returns the places, from 1 on, of the names that have no entry."""
# TOUCH: a server that evicts what nobody has used for long evicts something else.
ENDS = """
local function last(key)
  if redis.call('EXISTS', key) == 0 then return '0-0' end
  local told = redis.call('XINFO', 'STREAM', key)
  for i = 1, #told, 2 do if told[i] == 'last-generated-id' then return told[i + 1] end end
  return '0-0'
end
redis.call('TOUCH', KEYS[3])
return {redis.call('HGET', KEYS[3], ''), last(KEYS[1]), last(KEYS[2])}
"""
"""Returns the id, and the last entries of both streams."""
PAGE = """
local last, size, page = ARGV[1], 0, {}
for _, row in ipairs(redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', ARGV[2])) do
  local fields, bytes = row[2], 0
  for _, field in ipairs(fields) do bytes = bytes + #field end
  if #fields == tonumber(ARGV[3]) and bytes <= tonumber(ARGV[4]) then
    size = size + bytes
    if #page > 0 and size > tonumber(ARGV[5]) then break end
    local values = {row[1]}
    for i = 2, #fields, 2 do values[#values + 1] = fields[i] end
    page[#page + 1] = values
  end
  last = row[1]
end
return {last, page}
"""
"""Returns the last entry read, and the entries after another one, without those of another form:
after which, how many, how many fields and values of how many bytes, and how many bytes in all."""
_ENTRY = re.compile(rb"(\d{1,20})-(\d{1,20})")

_Place = tuple[int, int]


class RedisTokens:
    """The chunks of one model in a Redis server, a TokenLog whose methods raise OSError.

    Raises MissingExtraError and StoreError as ``RedisTier``; the server is not contacted.

    Args:
        url: the tier's. Time limit, prefix and credentials are the tier's, too.
        model: what the KV depends on beside tokens, namespace and lead-in, as a hash.
    """

    def __init__(self, url: TierUrl, model: str) -> None:
        self._seconds = url.options.get("timeout") or TIMEOUT_SECONDS
        self._client = connect(**redis_place(url), seconds=self._seconds)
        start = f"{url.options.get('prefix', PREFIX)}tokens:{model}:"
        self._keys = [f"{start}chunks", f"{start}removals", f"{start}names"]
        texts = (ADD, DISCARD, LACKING, ENDS, PAGE)
        scripts = [self._client.register_script(text) for text in texts]
        self._add, self._discard, self._lacking, self._ends, self._page = scripts
        self._id: bytes | None = None
        self._last_chunk: _Place = START
        self._last_removal: _Place | None = None
        self._has_lost = self._has_added = False
        self._room = TokenRoom()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def add(self, stored: Sequence[StoredTokens], fresh: Collection[Name] = ()) -> bool:
        """Write chunks that are missing, as TokenLog says."""
        for batch in _batches([one for one in stored if len(one.tokens) <= MOST_TOKENS]):
            names = [_text(one.name) for one in batch]
            with asking(self._seconds, ANSWER_BYTES):
                lacking = set(self._lacking(self._keys, names))
                with self._client.pipeline(transaction=False) as pipe:
                    for place, one in enumerate(batch, 1):
                        if one.name not in fresh and place not in lacking:
                            continue  # its tokens need not be sent
                        tokens = one.tokens.astype("<u4").tobytes()
                        told = [names[place - 1], one.follows, tokens, int(one.name in fresh)]
                        arguments = [*told, KEPT_REMOVALS, uuid4().hex]
                        self._add(self._keys, arguments, client=pipe)
                    pipe.execute()
            self._has_added = True
        return True

    def discard(self, names: Collection[Name]) -> None:
        """Remove chunks."""
        with (
            asking(self._seconds, ANSWER_BYTES),
            self._client.pipeline(transaction=False) as pipe,
        ):
            for name in names:
                self._discard(self._keys, [_text(name), KEPT_REMOVALS], client=pipe)
            pipe.execute()

    def news(self) -> Iterator[Mapping[Row, StoredTokens | None]]:
        """Yield what was removed and added since the last call, as TokenLog says."""
        last_chunk, last_removal = self._look()
        ends = time.monotonic() + SECONDS_AT_ONCE
        while self._last_removal is not None and self._last_removal < last_removal:
            if time.monotonic() > ends:
                return
            read, page = self._read(1, self._last_removal, fields=2, most=ROW_BYTES)
            self._last_removal = read if read > self._last_removal else last_removal
            rows = [row.decode(errors="replace") for _, row in page]
            for row in rows:
                self._room.free(row)
            yield dict.fromkeys(rows)
        while self._last_chunk < last_chunk and time.monotonic() <= ends:
            read, page = self._read(0, self._last_chunk, fields=6, most=ROW_BYTES)
            self._last_chunk = read if read > self._last_chunk else last_chunk
            found = {row.decode(): _chunk(*values) for row, *values in page}
            yield {
                row: one
                for row, one in found.items()
                if one is not None and self._room.takes(row, one)
            }

    def has_lost(self) -> bool:
        """Return whether the server lost what it held, as TokenLog says."""
        lost, self._has_lost = self._has_lost, False
        return lost

    def _look(self) -> tuple[_Place, _Place]:
        """Return the last entries of both streams, and see whether the server lost them."""
        with asking(self._seconds, ANSWER_BYTES):
            own, *ends = self._ends(self._keys)
        last_chunk, last_removal = (_place(end) for end in ends)
        is_other = self._id is not None and own != self._id
        if self._last_removal is None or is_other or last_chunk < self._last_chunk:
            self._has_lost = self._last_removal is not None or self._has_added
            self._last_chunk, self._last_removal = START, last_removal
            self._room.clear()
        self._last_removal = min(self._last_removal, last_removal)
        self._id = own
        return last_chunk, last_removal

    def _read(
        self, stream: int, after: _Place, *, fields: int, most: int
    ) -> tuple[_Place, list[list[bytes]]]:
        arguments = [f"{after[0]}-{after[1]}", ROWS_AT_ONCE, fields, most, PAGE_BYTES]
        with asking(self._seconds, ANSWER_BYTES):
            last, page = self._page([self._keys[stream]], arguments)
        return _place(last), page


def _batches(stored: Sequence[StoredTokens]) -> Iterator[list[StoredTokens]]:
    batch: list[StoredTokens] = []
    nbytes = 0
    for one in stored:
        nbytes += 4 * len(one.tokens)
        if batch and (nbytes > PAGE_BYTES or len(batch) == ROWS_AT_ONCE):
            yield batch
            batch, nbytes = [], 4 * len(one.tokens)
        batch.append(one)
    if batch:
        yield batch


def _text(name: Name) -> str:
    lead = name.lead_in
    own = (name.namespace, name.chunk_id, name.context_id)
    return "/".join((*own, lead.name, lead.tokens, str(lead.window)))


def _chunk(text: bytes, follows: bytes, tokens: bytes) -> StoredTokens | None:
    """Return the chunk of an entry, None if the entry is invalid."""
    words: list[Any] = text.decode(errors="replace").split("/")
    if len(words) != 6 or not re.fullmatch(r"[0-9]{1,9}", words[5]):
        return None
    words[5] = int(words[5])
    one = checked([*words, follows.decode(errors="replace"), tokens])
    return one if one is not None and _text(one.name).encode() == text else None


def _place(entry: object) -> _Place:
    """Return an entry's place in its stream; raises OSError."""
    found = _ENTRY.fullmatch(entry) if isinstance(entry, bytes) else None
    if found is None:
        raise OSError("the server names an entry that no stream can have")
    return int(found[1]), int(found[2])
