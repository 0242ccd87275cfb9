"""One object of tokens in an object store: chunks that were added, and rows that were removed.

Layout: a line with the format, the kind of digest and the digest, of the object's path and all that
follows the line (kv/mac.py: a checksum, or a MAC where there is a key); then, compressed by zlib:
the size of a JSON object, that object, and the chunks' tokens, one after another, first the lower
two bytes of each, then the upper two.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.engines.vllm.connector.stored_tokens import (
    LEAST_COUNTED,
    MOST_TOKENS,
    StoredTokens,
    checked,
)
from cacheblend_rag.kv.mac import Mac

FORMAT = "cacheblend-tokens-1"
OBJECT_BYTES = RAW_BYTES = 1 << 24
"""Of a segment at most, compressed and not."""
SEGMENT_TOKENS = 1 << 21
"""Tokens of a segment's chunks, as far as they are counted, unless it has a single chunk."""
MOST_CHUNKS = SEGMENT_TOKENS // LEAST_COUNTED
MOST_REMOVED = 20_000
TEXT_BYTES = 1 << 21
"""Of the JSON object, at most; a full segment's takes less."""
LEVEL = 1
"""zlib's fastest: tokens hardly get smaller by more work."""
_LINE = re.compile(rb"cacheblend-tokens-1 ([a-z0-9]{1,16}) ([0-9a-f]{32})\n")
_ROW = re.compile(r"[0-9a-f]{16}-[0-9a-f]{1,12}")
_SIZE = struct.Struct("<I")


class AddedRow(NamedTuple):
    """A chunk of a segment. is_new: it was stored anew, so that KV blended of it before is old."""

    row: str
    stored: StoredTokens
    is_new: bool


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What one object tells: chunks that were added, and rows that were removed."""

    added: Sequence[AddedRow] = ()
    removed: Sequence[str] = ()


def split(added: Iterable[AddedRow], removed: Sequence[str]) -> Iterator[Segment]:
    """Yield segments that are small enough, of chunks and of rows that were removed."""
    part: list[AddedRow] = []
    size, first, left = 0, removed[:MOST_REMOVED], removed[MOST_REMOVED:]
    for one in added:
        tokens = max(len(one.stored.tokens), LEAST_COUNTED)
        if part and size + tokens > SEGMENT_TOKENS:
            yield Segment(part, first)
            part, size, first = [], 0, ()
        part.append(one)
        size += tokens
    if part or first:
        yield Segment(part, first)
    for start in range(0, len(left), MOST_REMOVED):
        yield Segment((), left[start : start + MOST_REMOVED])


def encode(path: str, segment: Segment, mac: Mac) -> bytes:
    """Return the object that a segment is kept as under a path."""
    leads: dict[tuple[Any, ...], int] = {}
    chunks = []
    for row, one, is_new in segment.added:
        name = one.name
        lead = leads.setdefault((name.namespace, *astuple(name.lead_in)), len(leads))
        own = (name.chunk_id, name.context_id, one.follows)
        chunks.append((row, lead, *own, int(is_new), len(one.tokens)))
    told = {"leads": list(leads), "chunks": chunks, "removed": segment.removed}
    text = json.dumps(told, separators=(",", ":")).encode()
    arrays = [one.tokens for _, one, _ in segment.added]
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
    halves = [(tokens & 0xFFFF).astype("<u2"), (tokens >> 16).astype("<u2")]
    body = zlib.compress(
        b"".join((_SIZE.pack(len(text)), text, *(half.tobytes() for half in halves))), LEVEL
    )
    return b"%s %s %s\n%s" % (
        *(word.encode() for word in (FORMAT, mac.name, _digest(path, body, mac))),
        body,
    )


def decode(path: str, data: bytes, mac: Mac) -> Segment:
    """Return the segment of an object, without what is invalid in it.

    Raises ValueError if nothing in it can be used: it is damaged, or signed with another key.
    """
    line = _LINE.match(data)
    if line is None:
        raise ValueError(f"is not of the format {FORMAT}")
    kind, digest = line[1].decode(), line[2].decode()
    body = data[line.end() :]
    if kind != mac.name:
        raise ValueError(f"has a digest of the kind {kind}, not {mac.name}")
    if not mac.holds(digest, _beside(path), body):
        raise ValueError("its digest does not match")
    raw = _inflated(body)
    if len(raw) < _SIZE.size:
        raise ValueError("was cut short")
    start = _SIZE.size + _SIZE.unpack_from(raw)[0]
    if start > TEXT_BYTES:
        raise ValueError("its description is too long")
    try:
        told = json.loads(raw[_SIZE.size : start])
        leads, chunks, removed = told["leads"], told["chunks"], told["removed"]
        is_right = all(isinstance(one, list) for one in (leads, chunks, removed, *leads, *chunks))
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"its description cannot be read ({type(error).__name__})") from None
    if not is_right or len(chunks) > MOST_CHUNKS or len(removed) > MOST_REMOVED:
        raise ValueError("its description is not that of a segment")
    added = _added(leads, chunks, _tokens(raw[start:]))
    return Segment(list(added), [row for row in removed if _is_row(row)])


def _digest(path: str, body: bytes, mac: Mac) -> str:
    return mac.digest(_beside(path), body)


def _beside(path: str) -> bytes:
    """Return what the digest covers beside the object: under another path it does not hold."""
    return f"{path}\n".encode()


def _inflated(body: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(body, RAW_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if len(raw) > RAW_BYTES or not inflate.eof:
        raise ValueError("has another size than a segment")
    return raw


def _tokens(raw: bytes) -> NDArray[np.uint32]:
    count = len(raw) // 4
    low, high = (np.frombuffer(raw, "<u2", count, at).astype(np.uint32) for at in (0, 2 * count))
    high <<= 16
    low |= high
    return low


def _added(
    leads: list[list[Any]], chunks: list[list[Any]], tokens: NDArray[np.uint32]
) -> Iterator[AddedRow]:
    start = 0
    for one in chunks:
        if len(one) != 7:
            return
        row, lead, chunk, context, follows, is_new, count = one
        if type(count) is not int or not 0 < count <= min(MOST_TOKENS, len(tokens) - start):
            return  # where the others begin is not known
        own = tokens[start : start + count].astype("<u4").tobytes()
        start += count
        if not _is_row(row) or type(lead) is not int or not 0 <= lead < len(leads):
            continue
        if len(leads[lead]) != 4:
            continue
        namespace, *lead_in = leads[lead]
        stored = checked([namespace, chunk, context, *lead_in, follows, own])
        if stored is not None:
            yield AddedRow(row, stored, is_new == 1)


def _is_row(row: object) -> bool:
    return isinstance(row, str) and _ROW.fullmatch(row) is not None
