"""A server as users start it: ``python -m cacheblend_rag serve``, over a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx

from tests.local_servers import HOST, free_port
from tests.model_names.tiny_gguf import tiny_llama, write_gguf

START_SECONDS = 500.0
ASK, STORE = "ask-5b1f0c7e", "store-90d2aa41"
"""The server's own keys, where a test gives it some."""
KEYS = ("VLLM_API_KEY", "CACHEBLEND_STORE_KEY", "CACHEBLEND_TENANTS", "CACHEBLEND_ALLOWED_HOSTS")
DOCUMENTS = "/v1/cacheblend/documents"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PASSAGE = "The keeper of the old lighthouse wrote to the harbour master before dawn. " * 2


def tiny_model(folder: Path) -> Path:
    """Write a model that either engine serves as ``tiny``: a token a byte, windows of 1,024."""
    model = tiny_llama(hidden_size=256, max_position_embeddings=1024)
    return write_gguf(folder / "tiny.gguf", model)


class Served:
    """A server that listens; its log is kept.

    engine: ``transformers`` or ``vllm``. environment: further variables, such as keys.
    """

    def __init__(self, model: Path, engine: str, *flags: str, **environment: str) -> None:
        self.folder = model.parent
        self._log = self.folder / f"{free_port()}.log"
        port = free_port()
        profile = self.folder / "profile.toml"
        profile.write_text('name = "tiny"\n[blend]\nmin_tokens = 0\ncost_model = false\n')
        command = [
            *(sys.executable, "-m", "cacheblend_rag", "serve", str(model), "--engine", engine),
            *("--port", str(port), "--set", f"profile={profile}", *flags),
        ]
        kept = {name: value for name, value in os.environ.items() if name not in KEYS}
        settings = {"CACHEBLEND_MODELS": str(self.folder / "models"), "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**kept, **settings, **environment}
            )
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def ask(self, method: str, path: str, key: str | None = None, **content: Any) -> httpx.Response:
        """Send a request, with a key if one is given."""
        headers = content.pop("headers", {})
        if key is not None:
            headers = {"authorization": f"Bearer {key}", **headers}
        return self.http.request(method, path, headers=headers, **content)

    def answer(self, text: str, key: str | None = None, **more: Any) -> Any:
        """Return what an honest chat about a text is answered."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        answer = self.ask("POST", CHAT, key, json={**body, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(errors="replace")

    @property
    def schema(self) -> Any:
        """What it says about its routes."""
        return self.http.get("/openapi.json", headers={"authorization": f"Bearer {ASK}"}).json()

    def end(self) -> int:
        """Tell it to end; returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def __enter__(self) -> Self:
        end = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise RuntimeError(f"the server does not start: {self.log[-2000:]}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _is_up(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False
