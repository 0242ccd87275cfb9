"""The index of chunks in Redis: its fields, their checks, and the scripts that update it.

Anyone who can write to the server can write to the index, so each field is checked as it is read:
impossible values are dropped, and sizes and totals are recounted from the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.kv.chunk_kv import KVKey

VALUE_BYTES = 512 << 20
"""Redis' limit on the size of a value."""
TOTAL = ""
"""The field of ``about`` that holds the bytes of all chunks."""

# A note that no tier wrote was never added to the total.
_NOTED = """
local function noted(about)
  local bytes = about and string.match(about, '^(%d+) %d[%d.]*$')
  return bytes and #bytes <= 9 and tonumber(bytes) or 0
end
"""
RECORD = f"""{_NOTED}
local old = redis.call('HGET', KEYS[1], ARGV[1])
local bytes = tonumber(ARGV[2]) - noted(old)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
redis.pcall('HINCRBY', KEYS[1], '', bytes)
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
"""
"""Notes a chunk: about, used; its key, bytes, time of writing, time of use."""
# If memory is full, a script may not begin with a command that could take more.
FORGET = f"""{_NOTED}
local old = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
if ARGV[1] == '' then return 0 end
if old then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.pcall('HINCRBY', KEYS[1], '', -noted(old))
end
return redis.call('UNLINK', KEYS[3])
"""
"""Removes a chunk: about, used, the value's name; its key. Returns whether there was a value.
The field of the total is never removed as a chunk."""


@dataclass(frozen=True, slots=True)
class Note:
    """The index entry of one chunk: its bytes, and when it was first stored, a Unix time."""

    nbytes: int
    written_at: float


def note_of(text: Any) -> Note | None:
    """Parse a field of ``about``; None if no tier can have written it."""
    words = text.split() if isinstance(text, bytes) else []
    if len(words) != 2 or not words[0].isdigit() or len(words[0]) > len(str(VALUE_BYTES)):
        return None
    try:
        nbytes, written_at = int(words[0]), float(words[1])
    except ValueError:
        return None
    is_true = 0 < nbytes <= VALUE_BYTES and math.isfinite(written_at) and written_at >= 0
    return Note(nbytes, written_at) if is_true else None


def total_of(text: Any) -> int | None:
    """Return the total of bytes, 0 before the first chunk; None if the field is invalid."""
    if text is None:
        return 0
    is_count = isinstance(text, bytes) and text.isdigit() and len(text) <= 18
    return int(text) if is_count else None


def used_at(score: Any, written_at: float, now: float) -> float:
    """Return a chunk's time of last use, limited to possible values."""
    is_number = isinstance(score, int | float | str | bytes)
    try:
        seconds = float(score) if is_number else written_at
    except ValueError:
        return written_at
    return min(seconds, now) if math.isfinite(seconds) else written_at


def key_named(name: Any) -> KVKey | None:
    """Return the key in a field or member name, None if it is no chunk's name."""
    return KVKey.parsed(name.decode(errors="replace")) if isinstance(name, bytes) else None
