"""Message authentication of stored chunks: a checksum, or a MAC with a shared key.

A checksum detects damage, but not forgery, since anyone can compute it. With a key, which every
process gets from its environment, an object that was not written with it is not read.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from hashlib import blake2b

import xxhash

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Secret

VARIABLE = "CACHEBLEND_MAC_KEY"
"""The environment variable that holds a store's key."""
DIGITS = 32
"""Hex digits of a digest."""
LEAST_CHARACTERS = 16


class Mac:
    """Computes digests of bytes; without a key, xxh3_128 checksums.

    name: of the kind, in headers. by_key: whether computing it needs a key.
    """

    name, by_key = "xxh3", False

    def digest(self, *parts: bytes | memoryview) -> str:
        """Return the digest of some bytes, in hex digits."""
        found = xxhash.xxh3_128()
        for part in parts:
            found.update(part)
        return str(found.hexdigest())

    def holds(self, digest: str, *parts: bytes | memoryview) -> bool:
        """Whether a digest is that of these bytes."""
        return hmac.compare_digest(self.digest(*parts), digest)


class KeyedMac(Mac):
    """A keyed BLAKE2b digest (RFC 7693).

    Raises ConfigError for a key that is too short.
    """

    name, by_key = "blake2b", True

    def __init__(self, key: Secret) -> None:
        if len(key.get_secret_value()) < LEAST_CHARACTERS:
            raise ConfigError(f"{VARIABLE} must have at least {LEAST_CHARACTERS} characters")
        self._key = Secret(blake2b(key.get_secret_value().encode(), digest_size=32).hexdigest())

    def digest(self, *parts: bytes | memoryview) -> str:
        found = blake2b(key=bytes.fromhex(self._key.get_secret_value()), digest_size=DIGITS // 2)
        for part in parts:
            found.update(part)
        return found.hexdigest()


CHECKSUM = Mac()
MAC_NAMES = (Mac.name, KeyedMac.name)
"""All kinds, by their names in headers."""


def mac_of(environment: Mapping[str, str] = os.environ) -> Mac:
    """Return the MAC with the environment's key, or a checksum without one. Raises ConfigError."""
    key = Secret.of(environment.get(VARIABLE))
    return CHECKSUM if key is None else KeyedMac(key)
