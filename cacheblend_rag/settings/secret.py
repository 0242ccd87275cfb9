"""A secret that prints as asterisks, and checks that URLs hold no secret."""

from __future__ import annotations

from typing import NoReturn
from urllib.parse import urlsplit

from cacheblend_rag.errors import ConfigError


class Secret:
    """A string that appears in no repr, pickle or traceback with locals."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def of(cls, value: str | Secret | None) -> Secret | None:
        """Return ``value`` as a secret; None and "" are none."""
        return value if isinstance(value, Secret) else cls(value) if value else None

    def reveal(self) -> str:
        """Return the string."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied elsewhere. Raises TypeError."""
        raise TypeError("a secret is not pickled: give it again, or by the environment")


def check_server_url(url: str) -> None:
    """Raise ConfigError unless ``url`` is a server's, without a secret in it."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError("the server's URL holds a password: give its key as api_key=")
    if parts.query or parts.fragment:
        raise ConfigError("the server's URL holds a query: give its key as api_key=")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"url={url!r} must be like http://host:8000")
