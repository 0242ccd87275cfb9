"""TierUrl: one tier of a store as a URL, such as ``redis://cache:6379/0?ttl=1h``.

A URL describes a tier completely except for its password, which is cut out here and passed on by
the environment: shown, serialized and sent URLs never hold one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Secret, read_bytes, read_seconds

REDIS_SCHEMES = ("redis", "rediss", "unix")
OBJECT_SCHEMES = ("s3", "gs", "az", "file", "memory")
MEMORY_SCHEMES = ("device", "host")
SCHEMES = (*MEMORY_SCHEMES, "disk", *REDIS_SCHEMES, *OBJECT_SCHEMES)

CHOICES: Mapping[str, tuple[str, ...]] = {
    "write": ("through", "none"),
    "promote": ("yes", "no"),
    "admit": ("frequency", "always"),
    "fsync": ("yes", "no"),
}
COMMON = ("name", "ttl", "write", "promote", "timeout")
BOUNDED = ("capacity", "admit")
"""Options of the places whose capacity is ours to keep: servers have limits of their own."""
OWN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(MEMORY_SCHEMES, BOUNDED),
    "disk": (*BOUNDED, "fsync"),
    **dict.fromkeys(REDIS_SCHEMES, ("prefix", "db")),
    "rediss": ("prefix", "db", "ssl_ca_certs"),
    "s3": ("endpoint", "region"),
}
NEEDS: Mapping[str, str] = {
    "disk": "disk:///folder", "file": "file:///folder", "redis": "redis://host:6379/0",
    "rediss": "rediss://host:6379/0", "unix": "unix:///run/redis.sock", "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix", "az": "az://container/prefix",
}  # fmt: skip
"""Schemes that require a location, with an example."""


class TierUrl(str):
    """A tier's URL as text, without its password.

    scheme, host, port, user, path: its parts; path has no leading slash, but for a folder's.
    name: the tier's, as reports call it. options: typed, by name, without ``name``.
    """

    scheme: str
    host: str
    port: int | None
    user: str
    path: str
    name: str
    options: Mapping[str, Any]
    _password: Secret | None

    def __new__(cls, text: str) -> Self:
        """Read a URL; raises ConfigError, which names no secret."""
        if isinstance(text, cls):
            return text
        parts = _split(text)
        self = super().__new__(cls, _without_password(text, parts))
        self.scheme = parts.scheme
        self.host, self.user = parts.hostname or "", unquote(parts.username or "")
        self.port = parts.port
        self.path = unquote(parts.path)
        self._password = Secret.of(unquote(parts.password or ""))
        self.options = _options(parts)
        default = "redis" if parts.scheme in REDIS_SCHEMES else parts.scheme
        self.name = self.options.pop("name", default)
        _check(self)
        return self

    @property
    def variable(self) -> str:
        """The environment variable that holds the tier's password where the URL does not."""
        return f"CACHEBLEND_{self.name.upper().replace('-', '_')}_PASSWORD"

    @property
    def password(self) -> Secret | None:
        """The password: of the URL, or else of the environment."""
        return self._password or Secret.of(os.environ.get(self.variable))

    @property
    def outlives(self) -> bool:
        """Whether what is kept there outlives the process."""
        return self.scheme not in (*MEMORY_SCHEMES, "memory")

    def named(self, name: str) -> TierUrl:
        """Return the same tier under another name."""
        other = str.__new__(TierUrl, self)
        other.__dict__.update(self.__dict__, name=name)
        return other

    def __deepcopy__(self, memo: object) -> TierUrl:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the URL; raises TypeError if it held a password."""
        if self._password is not None:
            raise TypeError(f"a password is not pickled: give it as {self.variable}")
        return _again, (str(self), self.name)


def read_tiers(value: object) -> tuple[TierUrl, ...] | None:
    """Return a store's tiers from a list of URLs, or a text of several, comma-separated.

    Tiers with equal names get a number each, unless a URL set the name. Raises ConfigError.
    """
    if value is None:
        return None
    texts = value.split(",") if isinstance(value, str) and "," in value else value
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("tiers must be a list of URLs, such as host://?capacity=8GiB")
    urls = [TierUrl(text.strip() if type(text) is str else text) for text in texts]
    if not urls:
        raise ConfigError("tiers=[] names no tier: give one, such as host://?capacity=8GiB")
    return tuple(_told_apart(urls))


def _again(text: str, name: str) -> TierUrl:
    return TierUrl(text).named(name)


def _told_apart(urls: Iterable[TierUrl]) -> Iterable[TierUrl]:
    seen: Counter[str] = Counter()
    for url in urls:
        seen[url.name] += 1
        number = seen[url.name]
        if number > 1 and "name=" in url:
            raise ConfigError(f"tiers: two are named {url.name}: give each a name= of its own")
        yield url if number == 1 else url.named(f"{url.name}{number}")


def _split(text: str) -> SplitResult:
    scheme, is_url, _ = text.partition("://")
    if not is_url or scheme not in SCHEMES:
        shown = f"{scheme}://..." if is_url else "a text that is no URL"
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"tiers: {shown:.60} must begin with one of {known}")
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:  # whose text may quote a part of a password
        fix = "write special characters of a password as %XX"
        raise ConfigError(f"tiers: {scheme}://...: host or port cannot be read: {fix}") from None
    if parts.fragment or "@" in parts.path or "@" in parts.query:
        fix = "write # and / of a password as %23 and %2F"
        raise ConfigError(f"tiers: {scheme}://...: holds an unexpected # or @: {fix}")
    return parts


def _without_password(text: str, parts: SplitResult) -> str:
    if parts.password is None:
        return text
    place = parts.netloc.rpartition("@")[2]
    user = f"{parts.username}@" if parts.username else ""
    return parts._replace(netloc=user + place).geturl()


def _options(parts: SplitResult) -> dict[str, Any]:
    known = (*COMMON, *OWN.get(parts.scheme, ()))
    found: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            told = f"unknown option {name!r:.40}; known: {', '.join(known)}"
            raise ConfigError(f"tiers: {parts.scheme}://...: {told}")
        if name in found:
            raise ConfigError(f"tiers: {parts.scheme}://...: {name} is given twice: give it once")
        found[name] = _value(f"tiers: {parts.scheme}://...: {name}", name, text)
    return found


def _value(where: str, name: str, text: str) -> Any:
    if name == "capacity":
        return None if text == "none" else read_bytes(where, text)
    if name in ("ttl", "timeout"):
        return read_seconds(where, text)
    if name in CHOICES and text not in CHOICES[name]:
        raise ConfigError(f"{where}={text!r:.40} must be one of {', '.join(CHOICES[name])}")
    if name == "db" and not text.isdigit():
        raise ConfigError(f"{where}={text!r:.40} must be a number")
    if name == "name" and not (text.isascii() and text.replace("-", "_").isidentifier()):
        raise ConfigError(f"{where}={text!r:.40} must be letters, digits, - and _")
    return text == "yes" if name in ("promote", "fsync") else text


def _check(url: TierUrl) -> None:
    """Raise ConfigError for parts that a scheme lacks or does not use."""
    scheme, is_redis = url.scheme, url.scheme in REDIS_SCHEMES
    place = url.path.strip("/") if scheme in ("disk", "file", "unix") else url.host
    if scheme in NEEDS and not place:
        raise ConfigError(f"tiers: {scheme}://...: has no location: give it as {NEEDS[scheme]}")
    if scheme in (*MEMORY_SCHEMES, "memory", "disk", "file", "unix") and url.host:
        told = NEEDS.get(scheme, f"{scheme}://")
        raise ConfigError(f"tiers: {scheme}://...: has no host: give it as {told}")
    if (url.user or url._password) and not is_redis:
        raise ConfigError(
            f"tiers: {scheme}://...: takes no user: its credentials come from the environment"
        )
    number = url.path.strip("/")
    if scheme in ("redis", "rediss") and number and not number.isdigit():
        raise ConfigError(f"tiers: {scheme}://...: its path is the number of a database, as in /0")
