"""Who may ask a server: what a key reaches, and which web pages and hosts a server without one.

Beside the server's own keys, tenants have theirs, by a file of their hashes. It is TOML, a table
for each namespace, with the SHA-256 of the key with which its clients ask and of the one with which
they store; a list holds several, while keys are replaced::

    [acme]
    ask = "2bb80d53..."
    store = "9f86d081..."

A hash is of a random key (``new_entry``): nobody can find the key from it.

Any web page that a browser on this machine opens may send requests here, and by DNS rebinding, in
which the page's own name is pointed to this machine, it may read the answers, too. A key keeps such
pages out; without one, the names under which the server is addressed do.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cacheblend_rag.engines.vllm.namespaces import TENANTS_VARIABLE
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import ConfigError, first_line

if TYPE_CHECKING:
    from starlette.datastructures import Headers

KEY_VARIABLE = "VLLM_API_KEY"
STORE_KEY_VARIABLE = "CACHEBLEND_STORE_KEY"
DEFAULT_NAMESPACE = "default"
"""Of the server's own keys."""
LONGEST_NAME = 200
KEY_BYTES = 32
_HASH = re.compile(r"[0-9a-f]{64}")
_MAY_CHANGE = {"ask": False, "store": True}

STORERS_PATH = "/v1/cacheblend"
"""What is below it is for who may change the store, on every server; other paths are for who asks.
A tenant's grant is for its own namespace."""
STORERS_STATE = "cacheblend_lending"
"""What whoever answers these paths sets in the application's state."""
JOBS = f"{STORERS_PATH}/jobs"
"""It says by itself which jobs are for whom."""
RELEASES = f"{STORERS_PATH}/release"
"""It frees the memory of all tenants, so it is the server's own keys'."""
OPEN_TO_TENANTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models"),
    *("/inference/v1/generate", "/tokenize", "/detokenize", "/invocations", STORERS_PATH),
    *("/version", "/ping", "/health", "/docs", "/redoc", "/openapi.json"),
)
"""Paths that a tenant may ask, with what is below them. All others are the server's own keys':
metrics and load tell what other tenants do, and the rest changes the server for all."""


@dataclass(frozen=True)
class Grant:
    """What a key allows: a namespace, and whether its chunks may be stored and evicted."""

    namespace: str
    may_change: bool

    def may_ask(self, path: str) -> bool:
        """Whether this key may request a path; path: decoded, without the query string."""
        if self.namespace == DEFAULT_NAMESPACE:
            return True
        is_open = any(path == one or path.startswith(f"{one}/") for one in OPEN_TO_TENANTS)
        return is_open and path != RELEASES


class ServerKeys:
    """The keys that a server was started with, by its environment.

    Raises ConfigError when the file of tenants is wrong.

    Attributes:
        asking_key: of whoever asks; "" for none.
        store_key: of who may change the store, too; without one, all may who ask.
        tenants: what each tenant's key allows, by its hash; None without a file.
    """

    def __init__(self) -> None:
        self.asking_key = os.environ.get(KEY_VARIABLE, "")
        self.store_key = os.environ.get(STORE_KEY_VARIABLE, "")
        path = os.environ.get(TENANTS_VARIABLE)
        own = filter(None, (self.asking_key, self.store_key))
        self.tenants = read_tenants(Path(path), own) if path else None

    def grant(self, given: bytes, asking_keys: Iterable[str]) -> Grant | None:
        """Return what a key allows, None if it is none; asking_keys: of the namespace default."""
        if self.store_key and _is_one_of(given, [self.store_key]):
            return Grant(DEFAULT_NAMESPACE, may_change=True)
        if _is_one_of(given, asking_keys):
            return Grant(DEFAULT_NAMESPACE, may_change=not self.store_key)
        return (self.tenants or {}).get(hash_of(given))


def has_storers() -> bool:
    """Whether a key tells those who may store from those who may only ask."""
    return bool(os.environ.get(STORE_KEY_VARIABLE))


def lacks_store_key(what: str) -> ApiError:
    """Return the error for a request that needs the store key; what: it would do."""
    return ApiError(
        HTTPStatus.FORBIDDEN, f"to {what}, the key in the server's {STORE_KEY_VARIABLE} is needed"
    )


def _is_one_of(given: bytes, keys: Iterable[str]) -> bool:
    """Compare in constant time."""
    return any(tuple(hmac.compare_digest(given, key.encode()) for key in keys))


def hash_of(key: bytes) -> str:
    """Return a key's hash, as a tenants' file has it."""
    return hashlib.sha256(key).hexdigest()


def read_tenants(path: Path, taken: Iterable[str] = ()) -> Mapping[str, Grant]:
    """Return what each key of a tenants' file allows, by the key's hash.

    taken: keys that are the server's own.

    Raises ConfigError, naming the field, when the file cannot be read, or a hash, a name or a key
    is wrong.
    """
    granted: dict[str, Grant] = {}
    own = {hash_of(key.encode()) for key in taken}
    for field, known, grant in _entries(path):
        if known in own:
            raise ConfigError(f"{path}: {field} is the server's own key: make another")
        if known in granted:
            raise ConfigError(f"{path}: {field} occurs twice: make another key")
        granted[known] = grant
    return granted


def _entries(path: Path) -> Iterator[tuple[str, str, Grant]]:
    """Yield the field, the hash and the grant of each key."""
    try:
        tables = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {first_line(error):.200}") from error
    for namespace, table in tables.items():
        _check_name(path, namespace)
        shown, make = json.dumps(namespace), "(`serve --new-key NAME`)"
        if not isinstance(table, dict) or not table or table.keys() - _MAY_CHANGE.keys():
            raise ConfigError(f"{path}: [{shown}] must have ask = and store = {make}")
        for name, value in table.items():
            field = f"{name} of [{shown}]"
            for known in value if isinstance(value, list) else [value]:
                if not isinstance(known, str) or not _HASH.fullmatch(known.lower()):
                    told = f"{field} must be the SHA-256 of a key, 64 hex digits {make}"
                    raise ConfigError(f"{path}: {told}")
                yield field, known.lower(), Grant(namespace, _MAY_CHANGE[name])


def _check_name(path: Path, namespace: str) -> None:
    if not namespace.strip() or not namespace.isprintable() or len(namespace) > LONGEST_NAME:
        raise ConfigError(
            f"{path}: the namespace {namespace[:LONGEST_NAME]!r} must be of 1 to {LONGEST_NAME} "
            "printable characters"
        )


def new_entry(namespace: str) -> tuple[str, str, str]:
    """Return an asking key, a storing key, and the table of their hashes for a tenants' file.

    Raises ConfigError when the namespace cannot be one.
    """
    _check_name(Path("NAME"), namespace)
    ask, store = (secrets.token_hex(KEY_BYTES) for _ in range(2))
    name = json.dumps(namespace, ensure_ascii=False)
    hashes = (hash_of(key.encode()) for key in (ask, store))
    return ask, store, '[{}]\nask = "{}"\nstore = "{}"\n'.format(name, *hashes)


HOSTS_VARIABLE = "CACHEBLEND_ALLOWED_HOSTS"
"""Names of the server beside those of this machine's loopback, separated by commas."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host, by its name or address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check_host(host: str) -> str:
    """Return a host's name or address; raises ConfigError for anything else, such as a URL."""
    name = f"[{host}]" if host.count(":") > 1 else host
    if not re.fullmatch(r"[0-9A-Za-z._:-]+", host) or _name_of(f"//{name}") != host.lower():
        raise ConfigError(
            f"--allowed-host {host!r:.100} must be a name or an address, such as gpu.example, "
            "without scheme and port"
        )
    return host


def refusal(headers: Headers, host: str | None, origins: Iterable[str] = ()) -> str | None:
    """Return why a request to a server without a key is refused, None if it is answered.

    A request without the headers Host and Origin comes from no browser.

    Args:
        headers: of the request.
        host: where the server listens, its own name or address.
        origins: further pages that may ask, as ``https://gpu.example``.
    """
    names = {name.strip().lower() for name in os.environ.get(HOSTS_VARIABLE, "").split(",")}
    names |= {(host or "").lower()}
    key = "start the server with a key (VLLM_API_KEY), or with --allowed-host and"
    for told in headers.getlist("host"):
        if not _is_known(_name_of(f"//{told}"), names):
            return f"the host {told!r:.100} is not known here: {key} this name"
    for told in headers.getlist("origin"):
        if told not in origins and not _is_known(_name_of(told), names):
            return f"pages of {told!r:.100} may not ask here: {key} its name"
    return None


def _is_known(name: str, names: Iterable[str]) -> bool:
    return bool(name) and (is_loopback(name) or name in names)


def _name_of(url: str) -> str:
    """Return the host in a URL, in lower case; "" without one."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
