"""TierUrl: one tier of a store as a URL, such as ``redis://cache:6379/0?ttl=1h``.

A URL describes a tier completely except for its password, which is cut out here and passed on by
the environment: shown, serialized and sent URLs never hold one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import BeforeValidator, Field

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Bytes, Flag, Seconds, Secret, Settings
from cacheblend_rag.settings.options import Arguments

REDIS_SCHEMES = ("redis", "rediss", "unix")
OBJECT_SCHEMES = ("s3", "gs", "az", "file", "memory")
OF_PROCESS = ("device", "host", "memory")
"""Schemes of the memory of this process."""
OF_FOLDERS = ("disk", "file", "unix")
"""Schemes whose place is a path of this machine."""


def _limit(text: object) -> object:
    return None if text == "none" else text


class TierOptions(Settings):
    """The options of tiers, in the query of a URL."""

    _noun: ClassVar[str] = "option"

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$")] = ""
    ttl: Seconds | None = None
    promote: Flag = True
    timeout: Seconds | None = None
    capacity: Annotated[Bytes | None, BeforeValidator(_limit)] = None
    admit: Literal["frequency", "always"] = "frequency"
    prefix: str = ""
    db: Annotated[int, Field(ge=0, strict=False)] = 0
    ssl_ca_certs: str = ""
    endpoint: str = ""
    region: str = ""


OF_EVERY_TIER = {"name", "ttl", "promote", "timeout"}
PLACES: Mapping[str, tuple[str, set[str]]] = {
    "device": ("", {"capacity", "admit"}),
    "host": ("", {"capacity", "admit"}),
    "disk": ("/folder", {"capacity", "admit"}),
    "redis": ("host:6379/0", {"prefix"}),
    "rediss": ("host:6379/0", {"prefix", "ssl_ca_certs"}),
    "unix": ("/run/redis.sock", {"prefix", "db"}),
    "s3": ("bucket/prefix", {"endpoint", "region"}),
    "gs": ("bucket/prefix", set()),
    "az": ("container/prefix", set()),
    "file": ("/folder", set()),
    "memory": ("", set()),
}
"""Of each scheme an example of its location, if it needs one, and the options that it has beside
those of every tier: only where we keep the place, its capacity is ours to keep, too."""


class TierUrl(str):
    """A tier's URL as text, without its password.

    scheme, host, port, user, path: its parts; path has no leading slash, but for a folder's.
    name: the tier's, as reports call it. options: the given ones, typed, by name.
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
        parts, options = _read(text)
        self = super().__new__(cls, _without_password(text, parts))
        self.scheme, self.port = parts.scheme, parts.port
        self.host, self.user = parts.hostname or "", unquote(parts.username or "")
        self.path = unquote(parts.path)
        self._password = Secret.of(unquote(parts.password or ""))
        default = "redis" if self.scheme in REDIS_SCHEMES else self.scheme
        self.options, self.name = options, options.get("name", default)
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
        return self.scheme not in OF_PROCESS

    def __deepcopy__(self, memo: object) -> TierUrl:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the URL; raises TypeError if it held a password."""
        if self._password is not None:
            raise TypeError(f"a password is not pickled: give it as {self.variable}")
        return TierUrl, (str(self),)


def read_tiers(value: object) -> tuple[TierUrl, ...] | None:
    """Return a store's tiers from a list of URLs, or a text of several, comma-separated.

    Raises ConfigError for a URL that is none, and for two tiers of one name.
    """
    if value is None:
        return None
    texts = value.split(",") if type(value) is str else [value] if isinstance(value, str) else value
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("tiers must be a list of URLs, such as host://?capacity=8GiB")
    urls = [TierUrl(text.strip() if type(text) is str else text) for text in texts]
    if not urls:
        raise ConfigError("tiers=[] names no tier: give one, such as host://?capacity=8GiB")
    [(name, count)] = Counter(url.name for url in urls).most_common(1)
    if count > 1:
        raise ConfigError(f"tiers: {count} are named {name}: give each a ?name= of its own")
    return tuple(urls)


def _read(text: str) -> tuple[SplitResult, dict[str, Any]]:
    """Return the parts of a URL, and its options, typed. Raises ConfigError."""
    scheme, is_url, _ = text.partition("://")
    if not is_url or scheme not in PLACES:
        shown = f"{scheme}://..." if is_url else "a text that is no URL"
        known = ", ".join(f"{scheme}://" for scheme in PLACES)
        raise ConfigError(f"tiers: {shown:.60} must begin with one of {known}")
    try:
        parts = urlsplit(text)
        _check_place(parts, parts.port)
        return parts, _options(scheme, parts.query)
    except ConfigError as error:
        problem = str(error)
    except ValueError:  # whose text may quote a part of a password
        problem = "host or port cannot be read: write special characters of a password as %XX"
    raise ConfigError(f"tiers: {scheme}://...: {problem}")


def _check_place(parts: SplitResult, port: int | None) -> None:
    """Raise ConfigError for what a scheme lacks, or does not use."""
    scheme, path = parts.scheme, parts.path.strip("/")
    example, _ = PLACES[scheme]
    give = f"give it as {scheme}://{example}"
    if parts.fragment or "@" in parts.path or "@" in parts.query:
        raise ConfigError("holds an unexpected # or @: write # and / of a password as %23 and %2F")
    if example and not (path if scheme in OF_FOLDERS else parts.hostname):
        raise ConfigError(f"has no location: {give}")
    if scheme in (*OF_PROCESS, *OF_FOLDERS) and (parts.hostname or port):
        raise ConfigError(f"has no host: {give}")
    if (parts.username or parts.password) and scheme not in REDIS_SCHEMES:
        raise ConfigError("takes no user: its credentials come from the environment")
    if scheme in ("redis", "rediss") and path and not path.isdigit():
        raise ConfigError("its path is the number of a database, as in /0")


def _options(scheme: str, query: str) -> dict[str, Any]:
    """Return the given options of a tier, typed. Raises ConfigError."""
    pairs = parse_qsl(query, keep_blank_values=True)
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ConfigError(f"{name:.40} is given twice: give it once")
    _, own = PLACES[scheme]
    known = Arguments(TierOptions._noun, frozenset(OF_EVERY_TIER | own))
    return TierOptions(**known.read(dict(pairs))).given()


def _without_password(text: str, parts: SplitResult) -> str:
    if parts.password is None:
        return text
    place = parts.netloc.rpartition("@")[2]
    user = f"{parts.username}@" if parts.username else ""
    return parts._replace(netloc=user + place).geturl()
