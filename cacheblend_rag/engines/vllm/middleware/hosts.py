"""Which hosts and web pages a server without a key answers.

Any web page that a browser on this machine opens may send requests here, and by DNS rebinding, in
which the page's own name is pointed to this machine, it may read the answers, too. A key keeps such
pages out; without one, the names under which the server is addressed do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

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
