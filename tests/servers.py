"""Real servers for tests, started once a session: Redis, and an S3 endpoint."""

import threading
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.settings.tier_url import TierUrl
from tests.local_servers import (
    HOST,
    free_port,
    redis_server,
    redis_url,
    s3_server,
    s3_url,
)


@pytest.fixture(scope="session")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory):
    """A Redis server's socket."""
    path = tmp_path_factory.mktemp("redis") / "r.sock"
    with redis_server("--unixsocket", str(path)):
        yield str(path)


@pytest.fixture(scope="session")
def redis_tls(tmp_path_factory):
    """Where a Redis server is over TLS, and the file of the authority that vouches for it."""
    certificate, key = write_certificate(tmp_path_factory.mktemp("tls"))
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    port = free_port()
    with redis_server("--tls-port", str(port), *files, "--tls-auth-clients", "no"):
        yield {"host": HOST, "port": port, "ca_certs": str(certificate)}


def write_certificate(folder):
    """A certificate of this machine's that nobody but itself vouches for, and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, day = datetime.now(UTC), timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="session")
def s3():
    with s3_server() as server:
        yield server


def tier_at(url):
    """The tier that a URL describes."""
    return open_tier(TierUrl(url.rstrip("?&")), "cpu")


def redis_place(server, options=""):
    """A place of its own on a server, as a tier's URL."""
    return redis_url(server, f"prefix={uuid.uuid4().hex}:&{options}")


def redis_name(tier, key):
    """The name under which a Redis tier keeps a chunk, written out as its layout has it."""
    return f"{tier.prefix}kv:{key}"


def s3_place(server, options=""):
    """A place of its own in the bucket, as a tier's URL."""
    return s3_url(server, uuid.uuid4().hex, options)


class Refusing(BaseHTTPRequestHandler):
    """Answers every request alike: ``refusing`` says how, and where headers are noted."""

    def answer(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.asked.append(self.headers)
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.text.encode())

    do_GET = do_HEAD = do_PUT = do_DELETE = answer  # noqa: N815 - names of the library's

    def log_message(self, *_):
        pass


@contextmanager
def refusing(status, text="", asked=None):
    """An HTTP server that answers nothing but ``status`` and ``text``; its address.

    asked: a list in which it is to note each request's headers.
    """
    told = {"status": status, "text": text, "asked": [] if asked is None else asked}
    handler = type("Handler", (Refusing,), told)
    server = ThreadingHTTPServer((HOST, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
