"""Mixed clients of one server, for minutes: ``python -m tests.benchmarks.mixed_clients``.

Starts ``serve`` with the bundled model and a folder of chunk KV, over the embedded engine or vLLM.
Threads chat, stream, hang up in
the middle of a stream, complete texts and lists, ask for forms and tools, store, list and delete
documents, and send malformed bodies: at least ``--malformed`` of them. Ends with 1 when an answer
has a status of 500 or above other than 503, an answer cannot be read, the server's memory grows by
more than ``--most-mib`` after the first fifth of the time, or it does not end cleanly.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import openai
import typer

from cacheblend_rag.demo.corpus import generate_collection
from tests.local_servers import HOST, free_port
from tests.resident import resident_mib

MODEL = "demo"
FLAGS = {
    "transformers": (),
    "vllm": (
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ),
}
SHORT = 8
THREADS = 4
SAMPLE_SECONDS = 5.0
SCALARS = (None, True, -1, 0, 1e308, "", "x" * 300, "\x00", [], {}, [[]], [{}], {"type": 1})
PLACES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Who?", "max_tokens": 1},
    "/v1/responses": {"input": "Who?", "max_output_tokens": 1},
    "/v1/cacheblend/documents/bad": {"chunks": ["Who?"]},
}
OWN_FIELDS = (
    *("model", "messages", "prompt", "input", "n", "temperature", "top_p", "top_k", "stop", "seed"),
    *("tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "max_tokens"),
    *("stream", "stream_options", "text", "include", "chunks", "separator"),
)
FIELDS = {"transformers": (*OWN_FIELDS, "structured_outputs"), "vllm": OWN_FIELDS}
"""vLLM itself answers 500 where ``structured_outputs`` is no object."""
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


class Load:
    """What the threads share: the server, its documents, and what it answered."""

    def __init__(self, url: str, fields: Sequence[str]) -> None:
        self.url, self.fields, self.stop = url, fields, threading.Event()
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.http = httpx.Client(base_url=url, timeout=120)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3)
        documents, asked = generate_collection(24, 24, seed=11)
        self.texts = [document.text for document in documents]
        self.questions = [one.question for one in asked]

    def run(self, number: int) -> None:
        """Call the server until the time is over."""
        draw = random.Random(number)
        deeds: list[Callable[[random.Random], None]] = [
            *(self.chat, self.stream, self.leave, self.complete, self.form, self.tool),
            *(self.respond, self.store),
        ]
        if number % 2:
            deeds = [self.malformed]
        while not self.stop.is_set():
            deed = draw.choice(deeds)
            try:
                deed(draw)
                self.counts[deed.__name__] += 1
            except openai.APIStatusError as error:
                self.told(deed.__name__, error.status_code, str(error))
            except Exception as error:
                self.faults.append(f"{deed.__name__}: {error!r:.300}")

    def told(self, deed: str, status: int, text: str) -> None:
        """Note an answer's status."""
        self.counts[f"{deed} {status}"] += 1
        if status >= 500 and status != 503:
            self.faults.append(f"{deed}: {status} {text:.300}")

    def messages(self, draw: random.Random) -> list[Any]:
        content = f"{draw.choice(self.texts)}\n\nQuestion: {draw.choice(self.questions)}\nAnswer:"
        return [{"role": "user", "content": content}]

    def chat(self, draw: random.Random) -> None:
        asked = {"n": draw.choice((1, 1, 3)), "logprobs": draw.random() < 0.3}
        self.client.chat.completions.create(
            model=MODEL, messages=self.messages(draw), max_tokens=SHORT, **asked
        )

    def stream(self, draw: random.Random) -> None:
        stream = self.client.chat.completions.create(
            model=MODEL, messages=self.messages(draw), max_tokens=SHORT, stream=True
        )
        if not list(stream)[-1].choices[0].finish_reason:
            raise ValueError("a stream has no end")

    def leave(self, draw: random.Random) -> None:
        with self.client.chat.completions.create(
            model=MODEL, messages=self.messages(draw), max_tokens=512, stream=True
        ) as stream:
            next(iter(stream))

    def complete(self, draw: random.Random) -> None:
        prompts = draw.choice(([draw.choice(self.questions)] * 2, [3, 4, 5], self.questions[0]))
        self.client.completions.create(model=MODEL, prompt=prompts, max_tokens=SHORT)

    def form(self, draw: random.Random) -> None:
        answer = self.client.chat.completions.create(
            model=MODEL,
            messages=self.messages(draw),
            max_tokens=64,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        )
        json.loads(answer.choices[0].message.content)

    def tool(self, draw: random.Random) -> None:
        self.client.chat.completions.create(
            model=MODEL,
            messages=self.messages(draw),
            max_tokens=64,
            tools=[TOOL],
            tool_choice=draw.choice(("auto", "required", "none")),
        )

    def respond(self, draw: random.Random) -> None:
        self.client.responses.create(
            model=MODEL, input=draw.choice(self.questions), max_output_tokens=SHORT
        )

    def store(self, draw: random.Random) -> None:
        path = f"/v1/cacheblend/documents/notes/{draw.randrange(12)}"
        if draw.random() < 0.3:
            answer = self.http.delete(path)
        else:
            answer = self.http.put(path, json={"chunks": [draw.choice(self.texts)]})
        self.told("store", answer.status_code, answer.text)
        self.told("list", self.http.get("/v1/cacheblend/documents").status_code, "")

    def malformed(self, draw: random.Random) -> None:
        path = draw.choice(sorted(PLACES))
        body = {**PLACES[path]}
        for _ in range(draw.randrange(1, 4)):
            body[draw.choice(self.fields)] = draw.choice(SCALARS)
        sent = json.dumps(body).encode()
        if draw.random() < 0.2:
            sent = sent[: draw.randrange(len(sent))] + draw.randbytes(3)
        method = "PUT" if "documents" in path else "POST"
        headers = {"content-type": "application/json"}
        try:
            answer = self.http.request(method, path, content=sent, headers=headers)
        except httpx.HTTPError as error:
            raise ValueError(f"{error!r} for {method} {path} {sent!r:.200}") from error
        if answer.status_code >= 400:
            told = answer.json()  # vLLM tells of a body that is no JSON as FastAPI does
            if not (told["error"]["message"] if "error" in told else told["detail"]):
                raise ValueError(f"{method} {path} {sent!r:.200} told {answer.text:.200}")
        self.told("malformed", answer.status_code, f"{sent!r:.200} {answer.text}")


def main(
    *,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    minutes: Annotated[float, typer.Option(min=0.1)] = 30.0,
    malformed: Annotated[int, typer.Option(help="Least malformed bodies.")] = 10_000,
    most_mib: Annotated[float, typer.Option(help="Most growth of the server's memory.")] = 100.0,
    log: Annotated[Path | None, typer.Option(help="Where the server's log goes.")] = None,
) -> None:
    """Serve, load, and tell what happened."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        written = log or Path(folder) / "log"
        command = [
            *(sys.executable, "-m", "cacheblend_rag", "serve", MODEL, "--engine", engine),
            *("--port", str(port), "--kv-path", f"{folder}/kv", "--host-gib", "0.05"),
            *FLAGS[engine],
        ]
        with written.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            load = Load(f"http://{HOST}:{port}", FIELDS[engine])
            _await(load, server)
            sizes = _loaded(load, server.pid, minutes * 60, malformed)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
    settled = sizes[len(sizes) // 5 :]
    growth = settled[-1] - settled[0]
    print(json.dumps(dict(sorted(load.counts.items()))))
    print(
        f"memory: {sizes[0]:.0f} MiB at first, {settled[0]:.0f} after a fifth of the time, "
        f"{max(sizes):.0f} at most, {settled[-1]:.0f} at the end; exit code {code}"
    )
    tenths = [sizes[len(sizes) * tenth // 10] for tenth in range(10)]
    print("memory at each tenth of the time:", *(f"{size:.0f}" for size in tenths))
    for fault in load.faults[:20]:
        print(fault)
    raise typer.Exit(bool(load.faults) or growth > most_mib or code != 0)


def _await(load: Load, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if load.http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the server does not start")


def _loaded(load: Load, pid: int, seconds: float, malformed: int) -> list[float]:
    """Load the server; returns its memory from time to time, in MiB."""
    threads = [threading.Thread(target=load.run, args=(at,)) for at in range(THREADS)]
    for thread in threads:
        thread.start()
    end, sizes = time.monotonic() + seconds, []
    while time.monotonic() < end or load.counts["malformed"] < malformed:
        time.sleep(min(SAMPLE_SECONDS, seconds / 20))
        sizes.append(resident_mib(pid))
        if len(load.faults) > 100:
            break
    load.stop.set()
    for thread in threads:
        thread.join()
    return sizes


if __name__ == "__main__":
    typer.run(main)
