"""Small chunk KV and keys for the tests of codec, tiers and store."""

import torch

from cacheblend_rag.kv import ChunkKV, KVKey, chunk_id, fingerprint

FINGERPRINT = fingerprint({"model": "test"})
OTHER_FINGERPRINT = fingerprint({"model": "other"})


def make_key(number, *, of=FINGERPRINT):
    return KVKey(chunk_id([number]), of)


def make_kv(number=0, *, tokens=4, dtype=torch.float32, prior=True):
    generator = torch.Generator().manual_seed(number)
    keys, values = torch.randn(2, 2, 1, tokens, 8, generator=generator).to(dtype).unbind()
    scores = torch.rand(tokens, generator=generator) if prior else None
    return ChunkKV(keys, values, position=3, prior=scores)


def same(one, other):
    """Whether two chunk KV are equal, bit for bit."""
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
    return sorted(folder.glob("?/?/*.safetensors"))
