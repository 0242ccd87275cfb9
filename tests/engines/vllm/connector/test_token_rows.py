"""What objects with tokens hold, and which rows are there by them: no store is needed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.engines.vllm.connector import token_segment
from cacheblend_rag.engines.vllm.connector.stored_tokens import Name, Row, StoredTokens, id_of
from cacheblend_rag.engines.vllm.connector.token_rows import TokenRows
from cacheblend_rag.engines.vllm.connector.token_segment import (
    AddedRow,
    Segment,
    decode,
    encode,
    split,
)
from cacheblend_rag.engines.vllm.protocol.job import SentLeadIn
from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.kv.mac import CHECKSUM, KeyedMac, Mac
from cacheblend_rag.settings.base import Secret

PATH = "tokens/m/000000000001-0123456789abcdef-0"
BARE, LEAD = SentLeadIn("none", "", 0), SentLeadIn("document", "", 2048)
KEYED = KeyedMac(Secret("sixteen characters and more"))


def row(number: int) -> str:
    return f"0123456789abcdef-{number:x}"


def chunk(first: int, count: int = 40, *, lead_in: SentLeadIn = BARE, **other: str) -> StoredTokens:
    tokens = np.arange(first, first + count, dtype=np.uint32)
    namespace = namespace_id(other.pop("namespace", "default"))
    name = Name(namespace, id_of(tokens), other.pop("context", ""), lead_in)
    return StoredTokens(name, tokens, **other)


def added(number: int, one: StoredTokens, *, is_new: bool = False) -> AddedRow:
    return AddedRow(row(number), one, is_new)


FIRST, SECOND = chunk(100_000), chunk(7, 300, lead_in=LEAD, context="c" * 32, follows="f" * 32)
WHOLE = Segment([added(1, FIRST), added(2, SECOND, is_new=True)], [row(8), row(9)])


def plain(segment: Segment) -> object:
    rows = [
        (one.row, one.stored.name, one.stored.tokens.tolist(), one.stored.follows, one.is_new)
        for one in segment.added
    ]
    return rows, list(segment.removed)


def signed(body: bytes, mac: Mac = CHECKSUM, path: str = PATH) -> bytes:
    """An object whose digest is right, whatever it holds."""
    digest = mac.digest(f"{path}\n".encode(), body)
    return f"{token_segment.FORMAT} {mac.name} {digest}\n".encode() + body


def described(change: Callable[[dict[str, list[object]]], object]) -> bytes:
    """The object of WHOLE with another description and a right digest."""
    raw = zlib.decompress(encode(PATH, WHOLE, CHECKSUM).partition(b"\n")[2])
    end = 4 + int.from_bytes(raw[:4], "little")
    told = json.loads(raw[4:end])
    change(told)
    text = json.dumps(told).encode()
    return signed(zlib.compress(len(text).to_bytes(4, "little") + text + raw[end:]))


@pytest.mark.parametrize("mac", [CHECKSUM, KEYED], ids=["checksum", "key"])
def test_an_object_holds_what_was_written(mac: Mac) -> None:
    assert plain(decode(PATH, encode(PATH, WHOLE, mac), mac)) == plain(WHOLE)
    assert plain(decode(PATH, encode(PATH, Segment(), mac), mac)) == ([], [])


@pytest.mark.parametrize("at", [0, 25, 60, 90, -1])
def test_no_changed_byte_is_read(at: int) -> None:
    data = bytearray(encode(PATH, WHOLE, CHECKSUM))
    data[at] ^= 1
    with pytest.raises(ValueError, match=r"format|digest"):
        decode(PATH, bytes(data), CHECKSUM)


def test_an_object_counts_at_its_own_path_with_its_own_key_only() -> None:
    data = encode(PATH, WHOLE, KEYED)
    others = [(PATH + "0", KEYED), (PATH, CHECKSUM), (PATH, KeyedMac(Secret("another key " * 2)))]
    for path, mac in others:
        with pytest.raises(ValueError, match="digest"):
            decode(path, data, mac)
    with pytest.raises(ValueError, match="kind xxh3, not blake2b"):
        decode(PATH, encode(PATH, WHOLE, CHECKSUM), KEYED)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n" * 100,
        signed(b""),
        signed(b"no zlib"),
        signed(zlib.compress(b"\1")),
        signed(zlib.compress(b"\xff\xff\xff\xff{}")),
        signed(zlib.compress(b"\4\0\0\0null")),
        signed(zlib.compress(b"\2\0\0\0{}")),
        signed(zlib.compress(b"\4\0\0\0\xff\xfe\xfd\xfc")),
        signed(zlib.compress(b"\0\0\1\0" + b"[" * 65536)),
        signed(zlib.compress(b"\0\0\x30\0" + b" " * (3 << 20))),
        signed(zlib.compress(bytes(token_segment.RAW_BYTES + 1))),
        signed(zlib.compress(bytes(100))[:-4]),
        described(lambda told: told.update(leads=1)),  # type: ignore[arg-type]
        described(lambda told: told.update(leads=[1])),
        described(lambda told: told.update(chunks=told["chunks"] * 3000)),
        described(lambda told: told.update(removed=[""] * 20_001)),
    ],
)
def test_what_is_no_segment_is_an_error_of_one_line(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]{5,100}\Z"):
        decode(PATH, data, CHECKSUM)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, "no row"),
        (0, None),
        (1, 7),
        (1, -1),
        (1, "0"),
        (2, "0" * 32),
        (3, "elsewhere"),
        (4, 1),
    ],
)
def test_an_invalid_chunk_is_left_out(field: int, value: object) -> None:
    data = described(lambda told: told["chunks"][0].__setitem__(field, value))  # type: ignore[index]
    [left] = decode(PATH, data, CHECKSUM).added
    assert left.stored.name == SECOND.name


@pytest.mark.parametrize("value", [0, -1, 1 << 40, True, 1.0, None, "40", 41])
def test_a_wrong_length_makes_no_chunk(value: object) -> None:
    data = described(lambda told: told["chunks"][0].__setitem__(6, value))  # type: ignore[index]
    assert decode(PATH, data, CHECKSUM).added == []


def test_invalid_rows_remove_nothing() -> None:
    data = described(lambda told: told.update(removed=[1, None, "x", row(3)]))
    assert decode(PATH, data, CHECKSUM).removed == [row(3)]


def test_much_is_split_and_nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_segment, "SEGMENT_TOKENS", 1100)
    monkeypatch.setattr(token_segment, "MOST_REMOVED", 2)
    rows = [added(n, chunk(1000 * n, 40 + 600 * (n == 2))) for n in range(5)]
    gone = [row(n) for n in range(10, 15)]
    parts = list(split(rows, gone))
    assert [len(part.added) for part in parts] == [2, 1, 2, 0, 0]
    assert [len(part.removed) for part in parts] == [2, 0, 0, 2, 1]
    assert [one for part in parts for one in part.added] == rows
    assert sorted(one for part in parts for one in part.removed) == gone
    assert list(split([], [])) == []


# Rows


def tell(rows: TokenRows, *segments: Segment) -> set[Name]:
    """Which chunks a reader finds after it was told what changes."""
    known: dict[Name, Row] = {}
    for segment in segments:
        for number, one in rows.take(segment).items():
            if one is None:
                known = {name: own for name, own in known.items() if own != number}
            else:
                known[one.name] = number
    return set(known)


CHUNKS = [chunk(1000 * n) for n in range(3)]
CHANGES = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 11), max_size=3)),
    min_size=1,
    max_size=12,
)


@given(CHANGES, st.randoms(use_true_random=False))
def test_the_order_of_reading_makes_no_difference(
    changes: list[tuple[int, bool, list[int]]], draw: object
) -> None:
    """Nor does reading twice, nor out of an object that others were merged into."""
    segments = [
        Segment([added(n, CHUNKS[which], is_new=is_new)], [row(m) for m in gone if m < n])
        for n, (which, is_new, gone) in enumerate(changes)
    ]
    dead = {one for segment in segments for one in segment.removed}
    alive = {
        one.stored.name for segment in segments for one in segment.added if one.row not in dead
    }
    shuffled: list[Segment] = [*segments, *segments]
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    rows = TokenRows()
    assert tell(rows, *shuffled) == alive
    half = len(segments) // 2
    ours, theirs = TokenRows(), TokenRows()
    for segment in segments:
        ours.take(segment)
    left = ours.left([one for segment in segments[:half] for one in segment.added])
    gone = {one.row for segment in segments[:half] for one in segment.added}
    merged = Segment(left, [*ours.removed, *(gone - {one.row for one in left})])
    assert tell(theirs, merged, *segments[half:]) == alive
    assert all(theirs.of(name) for name in alive)


def test_a_chunk_stored_anew_is_told_though_another_row_is_there() -> None:
    rows = TokenRows()
    assert list(rows.take(Segment([added(1, FIRST)]))) == [row(1)]
    assert rows.take(Segment([added(2, FIRST)])) == {}, "another replica stored it, too"
    assert list(rows.take(Segment([added(3, FIRST, is_new=True)], [row(1), row(2)]))) == [row(3)]
    assert rows.take(Segment((), [row(3)])) == {row(3): None}
    assert rows.take(Segment([added(3, FIRST)])) == {}, "it was removed"


# Which objects are merged
