"""A server that answers as vLLM does, without a model: ``python stand_in_server.py PORT``.

The next token depends on the last three; each takes a hundredth of a second. Every chunk is a hit.
It needs no package but tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer, decoders

FILE = Path(__file__).parents[1] / "toy" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
SPECIAL = 300
MODEL = {"id": "toy", "root": "toy", "max_model_len": 4096, "object": "model"}
STATUS = {
    "active": True,
    "identity": "ab" * 8,
    "namespace": hashlib.blake2b(b"default", digest_size=16).hexdigest(),
    "shared": True,
    "replicas": 1,
}


def next_token(ids: list[int]) -> int:
    digest = hashlib.blake2b(str(ids[-3:]).encode(), digest_size=8).digest()
    return SPECIAL + int.from_bytes(digest) % (TOKENIZER.get_vocab_size() - SPECIAL)


def answer(prompt: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """The pieces of an answer."""
    ids, stream = list(prompt), decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    for count in range(1, tokens + 1):
        time.sleep(0.01)
        ids.append(next_token(ids))
        text = stream.step(TOKENIZER, ids[-1]) or ""
        ended = "length" if count == tokens else None
        yield {"index": 0, "text": text, "token_ids": ids[-1:], "finish_reason": ended}


def result_of(job: dict[str, Any]) -> dict[str, Any] | None:
    hits = [
        {"chunk_id": "0" * 32, "start": row[0], "tokens": row[1] - row[0], "hit": True}
        for row in job.get("chunks", ())
    ]
    told: dict[str, dict[str, Any]] = {
        "status": STATUS,
        "blend": {"chunks": [{**hit, "tier": "host"} for hit in hits]},
        "report": {"chunks": [{**hit, "tier": "host"} for hit in hits]},
        "precompute": {"computed": len(hits), "computed_tokens": len(hits)},
    }
    return told.get(job.get("kind", ""))


class Handler(BaseHTTPRequestHandler):
    """``running`` counts the requests at work."""

    protocol_version = "HTTP/1.1"
    running, lock = 0, Lock()

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self.reply(f'vllm:num_requests_running{{engine="0"}} {Handler.running}\n')
        return self.reply({"object": "list", "data": [MODEL]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        job = (body.get("kv_transfer_params") or {}).get("cacheblend", {})
        if isinstance(body["prompt"], str):
            ids = TOKENIZER.encode(body["prompt"], add_special_tokens=False).ids
            return self.complete([], prompt_token_ids=ids)
        tokens = body["max_tokens"] if job.get("kind", "blend") == "blend" else 1
        self.count(1)
        try:
            pieces = answer(body["prompt"], tokens)
            if body.get("stream"):
                return self.stream(pieces)
            result = result_of(job)
            params = None if result is None else {"cacheblend": result}
            return self.complete(list(pieces), params)
        finally:
            self.count(-1)

    def count(self, more: int) -> None:
        with Handler.lock:
            Handler.running += more

    def complete(self, pieces: list[dict[str, Any]], params: Any = None, **more: Any) -> None:
        choice = {
            "index": 0,
            "text": "".join(piece["text"] for piece in pieces),
            "token_ids": [token for piece in pieces for token in piece["token_ids"]],
            "finish_reason": "length",
            **more,
        }
        about = {"id": "x", "object": "text_completion", "kv_transfer_params": params}
        self.reply({**about, "choices": [choice]})

    def stream(self, pieces: Iterator[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            event = {"id": "x", "object": "text_completion", "choices": [piece]}
            self.write(f"data: {json.dumps(event)}\n\n".encode())
        self.write(b"data: [DONE]\n\n")
        self.write(b"")

    def write(self, part: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.flush()

    def reply(self, plain: Any) -> None:
        body = (plain if isinstance(plain, str) else json.dumps(plain)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        return


class Server(ThreadingHTTPServer):
    request_queue_size = 64


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
