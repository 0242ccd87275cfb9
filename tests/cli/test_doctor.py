from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cacheblend_rag.kv import DiskTier
from cacheblend_rag.observe import diagnosis
from tests.models import make_model
from tests.tokenizer_kinds import tokenizer_of


def test_a_usable_setup(cli, small_model):
    outcome = cli("doctor", "--model", small_model, "--json")
    found = outcome.json
    assert (outcome.code, found["usable"]) == (0, True)
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert found["model"]["problem"] is None
    assert found["devices"][0]["device"] == "cpu"
    assert found["versions"]["torch"]
    assert found["store"] is None


def test_a_missing_model_is_reported_not_raised(cli):
    outcome = cli("doctor", "--model", "/nowhere", "--json")
    assert (outcome.code, outcome.json["usable"]) == (1, False)
    assert "no such folder" in outcome.json["model"]["problem"]


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
    outcome = cli("doctor", "--model", tmp_path, "--json")
    assert outcome.code == 1
    assert "longrope" in outcome.json["model"]["problem"]
    evaluated = cli("eval", "--model", tmp_path, "--questions", 1, "--json")
    assert (evaluated.code, evaluated.stdout) == (2, "")
    assert "cannot be blended" in evaluated.stderr


def test_a_missing_extra_says_how_to_install_it(cli, small_model, monkeypatch):
    monkeypatch.setattr(diagnosis, "EXTRAS", {"demo": {"no-such-package": "no_such_package"}})
    extra = cli("doctor", "--model", small_model, "--json").json["extras"]["demo"]
    assert extra["missing"] == ["no-such-package"]
    assert extra["install"] == "pip install 'cacheblend-rag[demo]'"


def test_a_store_is_read_through(cli, small_model, tmp_path):
    outcome = cli("doctor", "--model", small_model, "--kv-path", tmp_path, "--json")
    assert "is not a store" in outcome.json["store"]["problem"]
    assert not any(tmp_path.iterdir())
    DiskTier(tmp_path)
    outcome = cli("doctor", "--model", small_model, "--kv-path", tmp_path, "--json")
    assert outcome.json["store"]["entries"] == 0
    assert outcome.json["store"]["damaged"] == []
    outcome = cli("doctor", "--model", small_model, "--kv-path", tmp_path / "none", "--json")
    assert (outcome.code, outcome.json["usable"]) == (1, False)


@pytest.mark.parametrize("model", [None, "/nowhere"])
def test_report_without_json(cli, small_model, model, tmp_path):
    outcome = cli("doctor", "--model", model or small_model, "--kv-path", tmp_path)
    assert ("not usable" in outcome.stdout) == (outcome.code == 1)
    assert "transformers" in outcome.stdout


def test_what_the_tokenizer_does_is_told(cli, tmp_path):
    for kind, prefix, said in (
        ("legacy prepend", True, "puts a space before texts"),
        ("wordpiece", False, "adds no space"),
        ("stripping", False, "adds no space"),
    ):
        folder = tmp_path / kind.replace(" ", "-")
        tokenizer = tokenizer_of(kind)
        make_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        outcome = cli("doctor", "--model", folder, "--json")
        told = outcome.json["model"]["tokenizer"]
        assert told["adds_prefix_space"] == prefix
        assert told["role_markers"] == "special tokens"
        assert outcome.code == 0
        assert said in cli("doctor", "--model", folder).stdout.replace("\n", " ")


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
    "no list": ({"kind": JSON, "body": b'{"data": "x"}'}, "its /v1/models lists no models"),
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
