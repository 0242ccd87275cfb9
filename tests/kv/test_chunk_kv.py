"""ChunkKV and KVKey: sizes, what is refused, what is related."""

from dataclasses import replace

import pytest
import torch

from cacheblend_rag.kv import ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.chunk_kv import is_finite, namespace_id, prefix_ids
from tests.kv.samples import make_kv, same, validate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numbers": torch.zeros(2, 2, 4, 8)}, r"numbers are torch.float32 \(2, 2, 4, 8\), want"),
        ({"numbers": torch.zeros(2, 3, 1, 4, 8)}, "want float .layers, 2, kv_heads"),
        ({"numbers": torch.zeros(2, 2, 0, 4, 8)}, "none of them 0"),
        ({"numbers": torch.zeros(2, 2, 1, 4, 8, dtype=torch.int32)}, "numbers are torch.int32"),
        ({"prior": torch.zeros(5)}, r"prior is torch.float32 \(5,\), want float32 \(4,\)"),
        ({"prior": torch.zeros(4, dtype=torch.float64)}, "prior is torch.float64"),
        ({"position": -1}, "position=-1 must be at least 0"),
        ({"prior": torch.tensor([0, 1, torch.nan, 0])}, "holds NaN or infinity"),
    ],
)
def test_what_is_no_chunk_kv_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        validate(replace(make_kv(), **change))


def test_parts_of_a_chunk_are_views_and_make_it_up():
    kv = make_kv(tokens=9)
    for whole in (kv, kv.packed(), kv.packed("int4")):
        parts = [whole.layer(0), whole.part(1, 2)]
        assert same(ChunkKV.joined(parts), whole)
        assert parts[1].numbers.data_ptr() == whole.numbers[1].data_ptr()
        some = whole.cut(2, 7)
        assert torch.equal(some.keys, whole.keys[:, :, 2:7])
        assert torch.equal(some.prior, whole.prior[2:7])
        assert (some.position, some.tokens, some.precision) == (5, 5, whole.precision)


def test_ids_of_prefixes_are_the_ids_of_their_tokens():
    tokens = [5, 300, 70_000, 9]
    assert prefix_ids(tokens, [0, 1, 1, 4]) == [
        "", chunk_id([5]), chunk_id([5]), chunk_id(tokens),
    ]  # fmt: skip
    assert chunk_id([1, 2]) != chunk_id([2, 1])
    assert chunk_id([256]) != chunk_id([1])
    assert len(chunk_id([])) == 32


def test_a_fingerprint_begins_with_its_namespace():
    one = fingerprint({"model": "a"}, "ours")
    assert len(one) == 64
    assert one.startswith(namespace_id("ours"))
    assert one == fingerprint({"model": "a"}, "ours")
    assert one != fingerprint({"model": "b"}, "ours")
    assert one[32:] != fingerprint({"model": "a"}, "theirs")[32:]
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}, "default")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("x" * 32, "0" * 64), "chunk_id='x{32}' must be 32 hex digits"),
        (("0" * 32, "0" * 63), "fingerprint='0{63}' must be 64 hex digits"),
        (("0" * 32, "0" * 16), "fingerprint='0{16}' must be 64 hex digits"),
        (("0" * 32, "0" * 64, "0" * 31), "context_id='0{31}' must be 32 hex digits or empty"),
    ],
)
def test_a_part_that_is_no_hash_is_named(parts, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        KVKey(*parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_finite_though_their_sum_is_not(dtype):
    largest = torch.full((4, 8), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)
    assert is_finite(torch.randn(4, 8).to(dtype))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for spoilt in (largest.clone(), torch.zeros(4, 8, dtype=dtype)):
            spoilt[2, 3] = wrong
            assert not is_finite(spoilt)
    both = torch.zeros(4, 8, dtype=dtype)
    both[0, 0], both[1, 1] = torch.inf, -torch.inf
    assert not is_finite(both)
