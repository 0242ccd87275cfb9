"""``doctor``: this machine and a model, a server, and a request with a fault."""

from __future__ import annotations

import json
import socket
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cacheblend_rag import open_engine
from tests.observe.toy_prompts import documents, prompts, text_of
from tests.toy import DEFAULT_FRAME, TOY

(PROMPT,) = prompts()


def test_a_usable_setup(cli, small_model):
    found = cli("doctor", small_model, "--json")
    assert (found.code, found.json["usable"]) == (0, True)
    assert found.json["model"]["architecture"] == "LlamaForCausalLM"
    assert found.json["model"]["problem"] is None
    assert found.json["devices"][0]["device"] == "cpu"
    assert found.json["versions"]["torch"]
    shown = cli("doctor", small_model)
    assert shown.code == 0
    assert "model architecture" in shown.stdout
    assert "not usable" not in shown.stdout


def test_a_missing_model_is_reported_not_raised(cli):
    outcome = cli("doctor", "/nowhere", "--json")
    assert (outcome.code, outcome.json["usable"]) == (1, False)
    assert "no such folder" in outcome.json["model"]["problem"]
    assert "not usable" in cli("doctor", "/nowhere").stdout


def test_a_model_that_cannot_be_blended_is_named(cli, small_model, tmp_path):
    for file in small_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = cli("doctor", tmp_path, "--json")
    assert outcome.code == 1
    assert "longrope" in outcome.json["model"]["problem"]


class _Answers(BaseHTTPRequestHandler):
    status, kind, body = 200, "text/html", b"<html>hello</html>"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


JSON = "application/json"
STRANGERS = {
    "a page": ({}, "its /v1/models lists no models"),
    "nothing there": ({"status": 404}, "it has no /v1/models"),
    "other JSON": ({"kind": JSON, "body": b'{"data": [1]}'}, "its /v1/models lists no models"),
    "another's models": (
        {"kind": JSON, "body": b'{"object": "list", "data": [{"id": "gpt", "object": "model"}]}'},
        "its /v1/models lacks the fields that vLLM sends",
    ),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_no_vllm_server_is_said_in_one_true_line(cli, stranger):
    answer, why = STRANGERS[stranger]
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), answer))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    outcome = cli("doctor", "--url", url)
    server.shutdown()
    server.server_close()
    said = f"not usable: engine='{url}' is not a vLLM server: {why}\n"
    assert (outcome.code, outcome.stdout, outcome.stderr) == (1, said, "")


def test_what_speaks_no_http_and_what_is_not_there_are_told_apart(cli):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        nobody = cli("doctor", "--url", url)
        assert (nobody.code, nobody.stdout.count("\n")) == (1, 1)
        assert "no server answers there (ConnectError); start it" in nobody.stdout
        listening.listen()

        def speak():
            while True:
                try:
                    with listening.accept()[0] as connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")
                except OSError:
                    return

        threading.Thread(target=speak, daemon=True).start()
        another = cli("doctor", "--url", url)
        assert (another.code, another.stdout.count("\n")) == (1, 1)
        assert "what answers there broke off or speaks no HTTP" in another.stdout


def test_a_prompt_with_a_fault(cli, tmp_path):
    kv_path, head = tmp_path / "kv", DEFAULT_FRAME.head
    engine = open_engine("transformers", model=TOY, kv_path=kv_path, instruction=head)
    engine.precompute(documents(PROMPT), progress=False)
    engine.close()
    before = {path: path.stat().st_mtime_ns for path in kv_path.rglob("*.*")}
    (tmp_path / "prompt.txt").write_text(text_of(PROMPT, lambda chunk: textwrap.fill(chunk, 60)))
    told = ("--set", f"kv_path={kv_path}", "--set", f"instruction={head}")
    outcome = cli("doctor", TOY, "--prompt", tmp_path / "prompt.txt", *told)
    assert outcome.code == 1
    assert "1. white_space_differs (fault, time to first token): " in outcome.stdout
    assert "   change white space of the prompt's template: " in outcome.stdout
    assert {path: path.stat().st_mtime_ns for path in kv_path.rglob("*.*")} == before


def test_a_question_to_a_collection(cli, indexed):
    folder, asked = indexed
    given = ("doctor", "--from", folder, "--question", asked[0].question, "--json")
    outcome = cli(*given)
    measured = outcome.json["measured"]
    assert outcome.code == outcome.json["has_fault"]
    assert (measured["blended"], measured["chunks"], measured["runs"]) == (True, 4, 3)
    assert measured["loss_nats_per_token"] is not None
    outcome = cli(*given, "--set", "recompute_ratio=1")
    assert outcome.code == 1
    found = [one for one in outcome.json["findings"] if one["code"] == "ratio_too_high"]
    assert found[0]["change"]["setting"] == "recompute_ratio"
    assert found[0]["change"]["present"] == "1"
