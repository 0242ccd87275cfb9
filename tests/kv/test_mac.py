"""A store with a key reads what was written with it, and nothing else."""

import pytest

from cacheblend_rag.errors import BadSignatureError, ConfigError, DamagedChunkError
from cacheblend_rag.kv.mac import CHECKSUM, VARIABLE, KeyedMac, mac_of
from cacheblend_rag.settings.base import Secret

from .samples import decode, encode, make_key, make_kv, rounded, same
from .test_codec import header_of, with_header

KEY = make_key(0)
OURS, THEIRS = "a key of sixteen characters", "another key of theirs"


def keyed(text=OURS):
    return KeyedMac(Secret(text))


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_what_a_key_wrote_it_reads(precision):
    kv = rounded(make_kv(), precision)
    assert same(decode(encode(KEY, kv, keyed()), KEY, keyed()), kv)


@pytest.mark.parametrize(
    ("written", "read", "said"),
    [
        (CHECKSUM, keyed(), "was not written with the store's key"),
        (keyed(), CHECKSUM, "was written with a key, and CACHEBLEND_MAC_KEY is not set"),
        (keyed(THEIRS), keyed(), "was written with another key, or is damaged"),
    ],
)
def test_what_another_wrote_is_not_read(written, read, said):
    data = encode(KEY, make_kv(), written)
    with pytest.raises(BadSignatureError, match=said):
        decode(data, KEY, read)


def test_no_object_is_signed_by_saying_so():
    """Neither a header that claims the MAC, nor a layer of the forger's, is taken."""
    fields, body = header_of(encode(KEY, make_kv()))
    fields["__metadata__"]["mac"] = "blake2b"
    with pytest.raises(BadSignatureError):
        decode(with_header(fields, body), KEY, keyed())
    ours = bytearray(encode(KEY, make_kv(), keyed()))
    ours[-1] ^= 1
    with pytest.raises(DamagedChunkError, match="layer 1"):
        decode(ours, KEY, keyed())


def test_a_key_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match="CACHEBLEND_MAC_KEY must have at least 16 characters"):
        mac_of({VARIABLE: "short"})
    assert mac_of({}) is CHECKSUM
