"""A receiver of spans over OTLP/HTTP, on the messages of the package ``opentelemetry-proto``."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATH = "/v1/traces"


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came; ids are hex digits, times seconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: float
    end: float
    attributes: dict[str, Any]
    status: int
    scope: str
    schema: str


class OTLPReceiver:
    """What was received so far."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[ReceivedSpan] = []
        self.bodies: list[bytes] = []

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.append(_read(span, of_scope))

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def children(self, of: ReceivedSpan) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.parent_id == of.span_id]

    def wait_for(self, name: str, seconds: float, *, below: ReceivedSpan) -> ReceivedSpan:
        """Return the first span of a name below another, once another process has sent it."""
        deadline = time.monotonic() + seconds
        while True:
            found = [span for span in self.children(below) if span.name == name]
            if found:
                return found[0]
            assert time.monotonic() < deadline, f"no {name} among {self.spans}"
            time.sleep(0.1)


@contextmanager
def receiving() -> Iterator[OTLPReceiver]:
    """Listen on a free port."""
    receiver = OTLPReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            known = self.path == PATH
            if known:
                receiver.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}{PATH}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read(span: Any, scope: Any) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        {one.key: _value(one.value) for one in span.attributes},
        span.status.code,
        scope.scope.name,
        scope.schema_url,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
