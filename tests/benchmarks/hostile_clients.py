"""Honest clients of a server beside hostile ones: ``python -m tests.benchmarks.hostile_clients``.

Starts ``serve`` with the bundled model, over the embedded engine or vLLM. Honest clients chat,
stream, complete, ask for forms and tools, and store documents, all the time; quiet minutes
alternate with minutes in which another process sends fuzzed bodies, jobs and requests about
documents, bodies that once took the server, and halves of requests, and hangs up. In the last of
these the server is told to end. Ends with 1 when an honest answer fails or changes, takes (median
or 95th percentile) more than three times as long as in quiet minutes, memory grows, a hostile
request is a server's error, or the server takes more than 5 s to end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import openai
import typer

from tests.engines.vllm.hostile import DOCUMENTS, about_documents, hostile_order, mutated
from tests.local_servers import HOST, free_port
from tests.resident import resident_mib
from tests.toy import TOY, generate_collection

MODEL = "toy"
FLAGS = {
    "embedded": (),
    "vllm": (
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ),
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
MOST_TIMES, MOST_SECONDS, MOST_MIB = 3.0, 5.0, 100.0
HONEST, FUZZING, PAUSE_SECONDS, SAMPLE_SECONDS, CATCH_UP_SECONDS = 2, 6, 0.2, 2.0, 5.0
KINDS = ("field", "field", "field", "document", "order")
"""What is fuzzed, as often as it stands here; what else vLLM answers 500 to is its own affair."""
MEANT = {501, 503}
"""A server's errors that are right: no such feature, too much at once."""
SCALARS = (None, True, -1, 0, 1e308, "", "x" * 300, "\x00", [], {}, [[]], [{}], {"type": 1})
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "Who?", "max_tokens": 1},
    RESPONSES: {"input": "Who?", "max_output_tokens": 1},
    f"{DOCUMENTS}/bad": {"chunks": ["Who?"]},
}
FIELDS = (
    *("model", "messages", "prompt", "input", "n", "temperature", "top_p", "top_k", "stop", "seed"),
    *("tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "max_tokens"),
    *("stream", "stream_options", "text", "include", "chunks", "separator"),
)
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def giants() -> list[tuple[str, dict[str, Any]]]:
    """Bodies of a valid request but for a field whose size once took the server, or its memory."""
    many, names = 5_000_000, {str(index): 1 for index in range(500_000)}
    user = {"role": "user"}
    return [
        *((CHAT, {"messages": [{**user, "content": [1] * n}]}) for n in (1000, 128_000, many)),
        *((CHAT, {"messages": [{}] * n}) for n in (8000, many // 2)),
        *((CHAT, {"stop": [1] * n}) for n in (30_000, many)),
        (CHAT, {"logit_bias": names}),
        (CHAT, {"tools": [{}] * 30_000}),
        *((CHAT, {"structured_outputs": {"choice": ["ab"] * n}}) for n in (30_000, 131_000)),
        *((COMPLETIONS, {"prompt": [1.5] * n}) for n in (30_000, many // 2)),
        *((COMPLETIONS, {"prompt": [1] * n}) for n in (1_000_000, many)),
        (COMPLETIONS, {"prompt": [["a"]] * 30_000}),
        *((RESPONSES, {"input": [{}] * n}) for n in (8000, many // 2)),
        *((RESPONSES, {"include": [1] * n}) for n in (30_000, many)),
        (RESPONSES, {"metadata": names}),
        (f"{DOCUMENTS}/bad", names),
        (f"{DOCUMENTS}/bad", {"chunks": [1] * many}),
    ]


class Honest:
    """Threads whose answers must be right, and nearly as fast as without the hostile ones."""

    def __init__(self, url: str) -> None:
        self.stop, self.is_hostile = threading.Event(), False
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.http = httpx.Client(base_url=url, timeout=120)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)
        documents, asked = generate_collection(24, 24, seed=11)
        self.texts = [document.text for document in documents]
        self.questions = [one.question for one in asked]
        self._known: dict[int, str] = {}

    def run(self, number: int) -> None:
        """Call the server until it is over."""
        draw = random.Random(number)
        others = (self.stream, self.complete, self.form, self.tool, self.respond, self.store)
        while not self.stop.is_set():
            for deed in (self.chat, draw.choice(others)):
                began, was_hostile = time.monotonic(), self.is_hostile
                try:
                    deed(draw)
                    self.counts[deed.__name__] += 1
                except Exception as error:
                    if not self.stop.is_set():
                        self.faults.append(f"{deed.__name__}: {error!r:.300}")
                if deed == self.chat and was_hostile == self.is_hostile:
                    self.seconds[was_hostile].append(time.monotonic() - began)
            self.stop.wait(PAUSE_SECONDS)

    def ask(self, draw: random.Random, **asked: Any) -> Any:
        content = f"{draw.choice(self.texts)}\n\nQuestion: {draw.choice(self.questions)}\nAnswer:"
        messages: list[Any] = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(
            model=MODEL, messages=messages, **{"max_tokens": 8, "temperature": 0, **asked}
        )

    def chat(self, draw: random.Random) -> None:
        which = draw.randrange(12)
        told = str(self.ask(random.Random(which)).choices[0].message.content)
        if self._known.setdefault(which, told) != told:
            raise ValueError(f"{told!r} is not {self._known[which]!r}")

    def stream(self, draw: random.Random) -> None:
        if not list(self.ask(draw, stream=True))[-1].choices[0].finish_reason:
            raise ValueError("a stream has no end")

    def complete(self, draw: random.Random) -> None:
        prompts = draw.choice(([draw.choice(self.questions)] * 2, [3, 4, 5], self.questions[0]))
        self.client.completions.create(model=MODEL, prompt=prompts, max_tokens=8)

    def form(self, draw: random.Random) -> None:
        json.loads(self.ask(draw, max_tokens=64, response_format=FORM).choices[0].message.content)

    def tool(self, draw: random.Random) -> None:
        choice = draw.choice(("auto", "required", "none"))
        tools = [{"type": "function", "function": FUNCTION}]
        self.ask(draw, max_tokens=64, tools=tools, tool_choice=choice)

    def respond(self, draw: random.Random) -> None:
        question = draw.choice(self.questions)
        self.client.responses.create(model=MODEL, input=question, max_output_tokens=8)

    def store(self, draw: random.Random) -> None:
        path = f"{DOCUMENTS}/notes/{draw.randrange(12)}"
        self.http.put(path, json={"chunks": [draw.choice(self.texts)]}).raise_for_status()
        self.http.get(DOCUMENTS).raise_for_status()


class Hostile:
    """Threads of another process. rate: fuzzed requests a second."""

    def __init__(self, url: str, engine: str, rate: float, shared: Any) -> None:
        self.url, self.engine, self.shared = url, engine, shared
        self.pause = FUZZING / rate
        self.sent = [
            (path, json.dumps({**PLAIN[path], **more}).encode()) for path, more in giants()
        ]
        works = [(self.fuzz, 0.0)] * FUZZING
        works += [(self.giant, 2.0), (self.leave, 2.0), (self.half, 1.0)]
        for number, (deed, pause) in enumerate(works):
            threading.Thread(target=self.run, args=(number, deed, pause), daemon=True).start()

    def run(
        self, number: int, deed: Callable[[random.Random, httpx.Client], None], pause: float
    ) -> None:
        draw, pause = random.Random(number), pause or self.pause
        due = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while True:
                self.shared.active.wait()
                try:
                    deed(draw, http)
                except (httpx.HTTPError, OSError) as error:
                    self.told(f"{deed.__name__} {type(error).__name__}")
                # What a slow answer delays is made up for, so that as many are sent as asked for.
                due = max(due + pause, time.monotonic() - CATCH_UP_SECONDS)
                time.sleep(max(0.0, due - time.monotonic()))

    def told(self, what: str) -> None:
        self.shared.told.put(what)

    def send(self, kind: str, http: httpx.Client, method: str, path: str, body: bytes) -> None:
        try:
            answer = http.request(
                method, path, content=body, headers={"content-type": "application/json"}
            )
        except httpx.LocalProtocolError:  # httpx itself refuses to send that
            return
        status = answer.status_code
        self.told(f"{kind} {status}")
        is_vllms = self.engine == "vllm" and path in {CHAT, COMPLETIONS} and kind != "field"
        if status >= 500 and status not in MEANT and not is_vllms:
            self.told(f"! {kind}: {method} {path[:80]} {body[:200]!r}: {answer.text:.200}")

    def fuzz(self, draw: random.Random, http: httpx.Client) -> None:
        kind = draw.choice(KINDS)
        if kind == "document":
            return self.send(kind, http, *about_documents(draw))
        if kind == "order" and self.engine == "vllm":
            return self.send("order", http, "POST", COMPLETIONS, hostile_order(draw))
        path = draw.choice(sorted(PLAIN))
        body = {**PLAIN[path]}
        for _ in range(draw.randrange(1, 4)):
            body[draw.choice(FIELDS)] = draw.choice(SCALARS)
        if body.get("max_tokens", 1) is None:  # asks for as long an answer as there may be
            body["max_tokens"] = 1
        if kind == "order":
            body = mutated(body, draw, deepest=900)
        sent = json.dumps(body).encode()
        if draw.random() < 0.2:
            sent = sent[: draw.randrange(len(sent))] + draw.randbytes(3)
        self.send(kind, http, "PUT" if DOCUMENTS in path else "POST", path, sent)

    def giant(self, draw: random.Random, http: httpx.Client) -> None:
        path, sent = draw.choice(self.sent)
        self.send("giant", http, "PUT" if DOCUMENTS in path else "POST", path, sent)

    def leave(self, draw: random.Random, http: httpx.Client) -> None:
        """Send what is long to answer, and hang up."""
        asked = draw.choice(
            (
                {"stop": ["a" * 400_000], "max_tokens": 64, "stream": True},
                {"stop": ["a" * 4000] * 16, "max_tokens": 512, "stream": True},
                {"messages": [{"role": "user", "content": "Who is it? " * 436_000}]},
                {"max_tokens": 512, "stream": True},
                {"n": 8, "max_tokens": 512},
            )
        )
        body = json.dumps({**PLAIN[CHAT], **asked}).encode()
        with self.opened(CHAT, "POST", len(body)) as connection:
            connection.sendall(body)
            time.sleep(0.5)
        self.told("left")

    def half(self, draw: random.Random, http: httpx.Client) -> None:
        """Leave headers or a body without their end, or send a body where none is read."""
        path, method = draw.choice((("/health", "GET"), (CHAT, "OPTIONS"), (CHAT, "POST")))
        connection = self.opened(path, method, 15 << 20, ends=draw.random() < 0.5)
        threading.Timer(25, connection.close).start()
        self.told("half")

    def opened(self, path: str, method: str, length: int, ends: bool = True) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=20)
        lines = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        end = f"Content-Length: {length}\r\n\r\n" if ends else ""
        connection.sendall(f"{lines}{end}".encode())
        return connection


class Shared:
    """What both processes share: events for readiness and for hostile minutes, and results.

    heard: the results that this process has read; a killed process takes the others with it.
    """

    def __init__(self, context: Any) -> None:
        self.ready, self.active = context.Event(), context.Event()
        self.told = context.Queue()
        self.heard: list[str] = []

    def hear(self) -> None:
        """Read what has been told."""
        while not self.told.empty():
            self.heard.append(self.told.get())


def be_hostile(url: str, engine: str, rate: float, shared: Any) -> None:
    """Run the hostile threads until the process is ended."""
    sys.set_int_max_str_digits(0)  # some of what is sent
    Hostile(url, engine, rate, shared)
    shared.ready.set()
    threading.Event().wait()


def main(
    *,
    engine: Annotated[str, typer.Option(help="embedded or vllm.")] = "embedded",
    minutes: Annotated[float, typer.Option(min=0.5)] = 30.0,
    slice_seconds: Annotated[float, typer.Option(help="Of a quiet or hostile minute.")] = 60.0,
    fuzzed: Annotated[int, typer.Option(help="Fuzzed requests.")] = 20_000,
    log: Annotated[Path | None, typer.Option(help="Where the server's log goes.")] = None,
) -> None:
    """Serve, load, and tell what happened."""
    port, context = free_port(), multiprocessing.get_context("spawn")
    shared, rounds = Shared(context), max(1, round(minutes * 30 / slice_seconds))
    with tempfile.TemporaryDirectory() as folder:
        written = log or Path(folder) / "log"
        kind = "transformers" if engine == "embedded" else engine
        command = [
            *(sys.executable, "-m", "cacheblend_rag", "serve", TOY, "--engine", kind),
            *("--port", str(port), "--kv-path", f"{folder}/kv", "--host-gib", "0.05"),
            *FLAGS[engine],
        ]
        with written.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        url = f"http://{HOST}:{port}"
        hostile = context.Process(
            target=be_hostile, args=(url, engine, fuzzed / (rounds * slice_seconds), shared)
        )
        try:
            honest = Honest(url)
            _await(honest, server)
            hostile.start()
            shared.ready.wait()
            sizes = _alternate(honest, shared, server, rounds, slice_seconds)
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(60)
            code, ended = server.poll(), time.monotonic() - began
            shared.hear()
        finally:
            hostile.kill()
            _kill(server)
    _tell(honest, shared, sizes, code, ended, fuzzed)


def _await(honest: Honest, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if honest.http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the server does not start")


def _kill(server: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    server.wait()


def _alternate(
    honest: Honest, shared: Shared, server: subprocess.Popen[bytes], rounds: int, seconds: float
) -> list[float]:
    """Alternate quiet and hostile minutes; returns samples of the server's memory, in MiB."""
    threads = [threading.Thread(target=honest.run, args=(at,)) for at in range(HONEST)]
    for thread in threads:
        thread.start()
    sizes = []
    for number in range(2 * rounds):
        honest.is_hostile = bool(number % 2)
        (shared.active.set if honest.is_hostile else shared.active.clear)()
        end = time.monotonic() + seconds
        while time.monotonic() < end and server.poll() is None:
            time.sleep(min(SAMPLE_SECONDS, seconds / 5))
            sizes.append(resident_mib(server.pid))
            shared.hear()
    honest.stop.set()
    return sizes


def _tell(
    honest: Honest, shared: Shared, sizes: list[float], code: int | None, ended: float, fuzzed: int
) -> None:
    counts = Counter(told for told in shared.heard if not told.startswith("!"))
    honest.faults += [told for told in shared.heard if told.startswith("!")]
    sent = sum(counts[told] for told in counts if told.split()[0] in KINDS and told[-1].isdigit())
    print(json.dumps(dict(sorted((honest.counts + counts).items()))))
    wrong = list(honest.faults)
    for name, at in (("median", 50), ("95th percentile", 95)):
        quiet, loud = (
            statistics.quantiles(honest.seconds[hostile], n=100)[at - 1]
            for hostile in (False, True)
        )
        print(
            f"chats, {name}: {quiet:.2f} s in quiet minutes, {loud:.2f} s in hostile ones, "
            f"{loud / quiet:.1f} times"
        )
        if loud > MOST_TIMES * quiet:
            wrong.append(f"the {name} is more than {MOST_TIMES:.0f} times")
    tenths = [
        statistics.median(sizes[at * len(sizes) // 10 :][: len(sizes) // 10 or 1])
        for at in range(10)
    ]
    growth = tenths[9] - statistics.median(tenths[3:6])
    print(
        "memory in each tenth of the time, MiB:",
        *(f"{size:.0f}" for size in tenths),
        f"at most {max(sizes):.0f}",
    )
    print(
        f"fuzzed requests: {sent}; told to end amid hostile ones: {ended:.1f} s, exit code {code}"
    )
    if growth > MOST_MIB:
        wrong.append(f"memory grew by {growth:.0f} MiB")
    if sent < fuzzed * 0.95:
        wrong.append(f"only {sent} fuzzed requests of {fuzzed}")
    if ended > MOST_SECONDS or code != 0:
        wrong.append(f"the server ended after {ended:.1f} s with {code}")
    print("\n".join(wrong[:20]) or "all held")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
