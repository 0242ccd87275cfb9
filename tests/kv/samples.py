"""Small chunk KV and keys for the tests of codec, tiers and store."""

import threading
import time
from functools import partial

import torch

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv import (
    ChunkKV,
    Entry,
    HostTier,
    KVKey,
    StoredChunk,
    chunk_id,
    codec,
    fingerprint,
)
from cacheblend_rag.kv.mac import CHECKSUM
from cacheblend_rag.kv.reader import StoredBytes, open_ranges
from cacheblend_rag.kv.stored_chunk import Lookup

FINGERPRINT = fingerprint({"model": "test"})
OTHER_FINGERPRINT = fingerprint({"model": "other"})


def make_key(number, *, of=FINGERPRINT):
    return KVKey(chunk_id([number]), of)


def make_kv(number=0, *, tokens=4, dtype=torch.float32, prior=True):
    generator = torch.Generator().manual_seed(number)
    keys, values = torch.randn(2, 2, 1, tokens, 8, generator=generator).to(dtype).unbind()
    scores = torch.rand(tokens, generator=generator) if prior else None
    return ChunkKV.of(keys, values, position=3, prior=scores)


def validate(kv):
    """Check a chunk's form and numbers."""
    kv.check_form()
    if not kv.is_finite():
        raise ValueError("holds NaN or infinity")


def encode(key, kv, mac=CHECKSUM):
    """A chunk as one safetensors object, as tiers write it."""
    validate(kv)
    return b"".join(codec.ChunkObject(key, kv, mac).parts())


def decode(data, key, mac=CHECKSUM):
    """What ``encode`` wrote; raises as reading does."""
    if not len(data):
        raise DamagedChunkError("empty")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    head = codec.read_head(lambda start, end: raw[start:end], raw.numel(), key, mac)
    return head.checked(0, head.shape[0], raw[head.start :])


def rounded(kv, precision):
    """Return a chunk as it is kept by a store of a precision."""
    return kv.packed(precision)


def taken(source):
    """All that is left of a source as lookups: chunks are put together from their layers."""
    found = [source.take() for _ in range(len(source))]
    source.keep([one.head is not None for one in found])
    heads = [one.head for one in found if one.head is not None]
    layers = [source.layer(index) for index in range(max((h.layers for h in heads), default=0))]
    whole = iter([ChunkKV.joined(own) for own in zip(*layers, strict=True)])
    return [
        Lookup(None if one.head is None else next(whole), one.tier, one.reason) for one in found
    ]


class SlowTier(HostTier):
    """Memory that is as slow to read as a network: reads wait at ``gate``, and are counted.

    keys: those read, in the order in which their reads began. found: those whose KV was there.
    most_at_once: reads under way.
    """

    reads_at_once = 8

    def __init__(self, gate=lambda: time.sleep(0.05), *, name="slow"):
        super().__init__(None, name=name)
        self.gate, self.keys, self.found, self.most_at_once = gate, [], [], 0
        self._reading, self._counting = 0, threading.Lock()

    def fill(self, keys):
        for number, key in enumerate(keys):
            assert self.put(key, StoredChunk(make_kv(number), time.time()))

    def _open(self, key):
        with self._counting:
            self.keys.append(key)
            self._reading += 1
            self.most_at_once = max(self.most_at_once, self._reading)
        self.gate()
        chunk = super()._open(key)
        with self._counting:
            self._reading -= 1
            if chunk is not None:
                self.found.append(key)
        return chunk


class SlowBytes(HostTier):
    """Objects that are read by ranges, as slow as a network: reads wait at ``gate(key, start)``.

    objects: the bytes, to be altered. heads: bytes that are read first. least: bytes worth a read.
    most: bytes up to which each read is twice as large as the one before.
    ranges: what was read behind the heads, in the order in which the reads began.
    opened: chunks whose heads were asked for.
    """

    def __init__(self, gate=lambda key, start: None, *, least=1, name="bytes"):
        super().__init__(None, name=name)
        self.gate, self.least, self.objects, self.ranges, self.opened = gate, least, {}, [], []
        self.written_at, self.most = time.time(), 0

    def fill(self, kvs):
        for key, kv in kvs.items():
            self.objects[key] = bytearray(b"".join(codec.ChunkObject(key, kv).parts()))

    def _entry(self, key):
        return Entry(len(self.objects[key]), 0, 0) if key in self.objects else None

    def _drop(self, key):
        return self.objects.pop(key, None) is not None

    def _open(self, key):
        self.opened.append(key)
        start = self._read(key, 0, codec.HEAD_BYTES)
        read = partial(self._read, key)
        return start and open_ranges(key, start, read, least=self.least, most=self.most)

    def _read(self, key, start, end):
        if start:
            self.ranges.append((key, start))
            self.gate(key, start)
        if key not in self.objects:
            return None
        data = self.objects[key]
        raw = torch.tensor(list(data[start:end]), dtype=torch.uint8)
        return StoredBytes(raw, len(data), self.written_at)


def until(condition, seconds=5.0):
    """Wait for something that other threads bring about; whether they did."""
    end = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < end:
        time.sleep(0.002)
    return is_met


def same(one, other):
    """Whether two chunk KV are equal, bit for bit, and rounded in the same way."""
    if one.precision != other.precision:
        return False
    if (one.prior is None) != (other.prior is None) or one.position != other.position:
        return False
    pairs = [(one.keys, other.keys), (one.values, other.values)]
    if one.prior is not None:
        pairs.append((one.prior, other.prior))
    return all(_same_tensor(a, b) for a, b in pairs)


def _same_tensor(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def chunk_files(folder):
    return sorted(folder.glob("??/*.safetensors"))
