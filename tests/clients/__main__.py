"""Installs clients into environments of their own and tells what each gets of a server.

``python -m tests.clients --engine vllm --clients litellm dspy``. A client asks a question, streams
the same answer, and has a tool return stored passages as its users' tools do. The model is too
small to call tools by itself: a proxy requires a call where no result stands yet. Per client:

    works, streams: it gets an answer, and the same one in pieces.
    tools: it gets an answer after the tool's result.
    reuses: what it reuses of the passages, as a share of what a chat with just them reuses.
    form: how that prompt holds the first passage's beginning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from cacheblend_rag.demo.passages import load_passages
from tests.benchmarks.command import run, say
from tests.local_servers import HOST, free_port

MODEL, KEY = "smollm2", "sesame"
NOTES = 4
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "litellm": ("litellm",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "openai_agents": ("openai-agents",),
    "haystack": ("haystack-ai",),
    "dspy": ("dspy",),
    "langchain": ("langchain", "langchain-openai"),
    "llama_index": ("llama-index-core", "llama-index-llms-openai-like"),
    "open_webui": ("open-webui",),
    "vercel": ("ai", "@ai-sdk/openai-compatible", "zod"),
}
NPM = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")
TOOLS: Mapping[str, tuple[str, ...]] = {
    "transformers": (),
    "vllm": ("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
}
"""The flags with which a server takes tools of a model whose chat template knows none."""
START_SECONDS, CLIENT_SECONDS = 600.0, 600.0


def measure(
    *,
    engine: str = "transformers",
    clients: tuple[str, ...] = tuple(PACKAGES),
    environments: str = "",
) -> dict[str, Any]:
    """Return a row for each client.

    engine: of the server, transformers or vllm. environments: a folder that keeps what is
    installed; by default it is removed.
    """
    with ExitStack() as held:
        folder = Path(environments or held.enter_context(tempfile.TemporaryDirectory()))
        notes = [one.text for one in load_passages().passages[:NOTES]]
        proxy = held.enter_context(recorded(held.enter_context(served(engine, notes))))
        asked = {"messages": [{"role": "user", "content": "\n\n".join(notes)}], "max_tokens": 1}
        told = proxy.http.post("/v1/chat/completions", json={"model": MODEL, **asked})
        most = cached_tokens(told.json()["usage"])
        return {name: row(name, folder, proxy, notes, most) for name in clients}


def cached_tokens(usage: dict[str, Any]) -> int:
    """Return the tokens of a prompt whose KV was reused."""
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def row(name: str, folder: Path, proxy: Proxy, notes: list[str], most: int) -> dict[str, Any]:
    """Return what a client gets; its last lines of errors if it fails. most: see cached_tokens."""
    say(f"installing {name}")
    command, place = installed(name, folder / name)
    proxy.exchanges.clear()
    given = {"URL": proxy.url, "KEY": KEY, "MODEL": MODEL, "NOTES": json.dumps(notes)}
    environment = {**os.environ, **{f"CLIENT_{key}": value for key, value in given.items()}}
    say(f"running {name}")
    ran = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False,
        timeout=CLIENT_SECONDS,
    )  # fmt: skip
    if ran.returncode:
        return {"works": False, "error": ran.stderr.splitlines()[-3:]}
    seen = json.loads(ran.stdout.splitlines()[-1])
    holding = [one for one in proxy.exchanges if notes[0][:20] in one[0] and one[1]]
    if not holding:
        return {"works": True, "error": ["its prompts hold no passage"]}
    prompt, usage = holding[-1]
    at = prompt.find(notes[0][:20])
    return {
        "works": bool(seen["answer"]),
        "streams": bool(seen["streamed"]) and seen["streamed"].strip() == seen["answer"].strip(),
        "tools": bool(seen["after_tool"]),
        "reuses": round(min(1, cached_tokens(usage) / most), 2),
        "form": prompt[max(0, at - 40) : at + 20],
    }


def installed(name: str, folder: Path) -> tuple[list[str], Path]:
    """Install a client; returns the command of its script, and where to run it."""
    here = Path(__file__).parent
    if name == "vercel":
        folder.mkdir(exist_ok=True)
        subprocess.run([*NPM, *PACKAGES[name]], cwd=folder, check=True)
        script = folder / "client.mjs"  # node looks for packages beside the script
        script.write_text((here / "with_vercel.mjs").read_text())
        return ["node", str(script)], folder
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
    return [str(python), str(here / f"with_{name}.py")], here


@contextmanager
def served(engine: str, notes: list[str]) -> Iterator[str]:
    """Serve the model with the notes stored, each a document; yields the server's URL."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "wb") as log:
        url = f"http://{HOST}:{(port := free_port())}"
        command = [
            *(sys.executable, "-m", "cacheblend_rag", "serve", MODEL, "--engine", engine),
            *("--port", str(port), "--kv-path", folder, *TOOLS[engine]),
        ]
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "VLLM_API_KEY": KEY}
        )
        with httpx.Client(base_url=url, timeout=START_SECONDS) as http:
            http.headers["Authorization"] = f"Bearer {KEY}"
            try:
                _wait(http, process, Path(folder) / "log")
                for at, text in enumerate(notes):
                    path = f"/v1/cacheblend/documents/note-{at}"
                    http.put(path, json={"chunks": [text]}).raise_for_status()
                yield url
            finally:
                process.terminate()
                process.wait(60)


def _wait(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers; raises SystemExit with its log when it does not."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if http.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit(log.read_text())


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server; ``exchanges`` keeps each prompt with the answer's usage."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__((HOST, 0), _Passing)
        key = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=upstream, timeout=CLIENT_SECONDS, headers=key)
        self.exchanges: list[tuple[str, dict[str, Any] | None]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave alone a client that has gone; the server's own faults are its script's errors."""

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://{HOST}:{self.server_port}"


class _Passing(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("tools"):
            called = any(one["role"] == "tool" for one in body["messages"])
            body["tool_choice"] = "none" if called else "required"
            for one in body["tools"]:  # else vLLM does not hold the arguments to their schema
                one["function"]["strict"] = True
        self._pass(body)

    def _pass(self, body: dict[str, Any] | None) -> None:
        answer = self.server.http.request(self.command, self.path, json=body)
        kind = answer.headers["content-type"]
        usage = answer.json().get("usage") if kind == "application/json" else None
        if body:
            texts = [str(one.get("content")) for one in body.get("messages", ())]
            self.server.exchanges.append(("\n".join(texts), usage))
        self.send_response(answer.status_code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def recorded(upstream: str) -> Iterator[Proxy]:
    """Run a Proxy before a server until the block is left."""
    with Proxy(upstream) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()


if __name__ == "__main__":
    run(measure)
