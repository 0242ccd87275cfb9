"""Open WebUI, served beside: a chat with files, whose whole texts it puts into a prompt."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from given import ABOUT, KEY, MODEL, MOST_TOKENS, NOTES, QUESTION, URL, tell

START_SECONDS = 300


def chat(http: httpx.Client, question: str, files: list[dict[str, str]], stream: bool) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "files": files}
    settings = {"stream": stream, "max_tokens": MOST_TOKENS, "temperature": 0}
    told = http.post("/api/chat/completions", json={**body, **settings})
    told.raise_for_status()
    if not stream:
        return told.json()["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in told.text.splitlines() if "{" in line]
    parts = [choice["delta"] for line in lines for choice in json.loads(line).get("choices", ())]
    return "".join(part.get("content") or "" for part in parts)


def wait(http: httpx.Client) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            if http.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    sys.exit("Open WebUI does not start")


with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
with tempfile.TemporaryDirectory() as folder:
    settings = {
        "OPENAI_API_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": KEY, "ENABLE_OLLAMA_API": "false",
        "WEBUI_AUTH": "false", "WEBUI_SECRET_KEY": KEY, "DATA_DIR": folder, "OFFLINE_MODE": "true",
        "BYPASS_EMBEDDING_AND_RETRIEVAL": "true", "RAG_EMBEDDING_ENGINE": "openai",
    }  # fmt: skip
    program = Path(sys.executable).with_name("open-webui")
    process = subprocess.Popen(
        [program, "serve", "--port", port], env={**os.environ, **settings}, stdout=sys.stderr
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            wait(http)
            signed = http.post("/api/v1/auths/signin", json={"email": "", "password": ""})
            http.headers["Authorization"] = f"Bearer {signed.json()['token']}"
            http.get("/api/models").raise_for_status()
            answer, streamed = (chat(http, QUESTION, [], stream) for stream in (False, True))
            sent = [
                http.post("/api/v1/files/", files={"file": (f"{at}.txt", text, "text/plain")})
                for at, text in enumerate(NOTES)
            ]
            files = [{"type": "file", "id": one.json()["id"], "context": "full"} for one in sent]
            tell(answer, streamed, chat(http, ABOUT, files, False))
    finally:
        process.terminate()
        process.wait(60)
