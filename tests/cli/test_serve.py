"""`serve`: what it becomes, and errors of one line."""

from __future__ import annotations

import json
import socket

import pytest

from cacheblend_rag import models
from cacheblend_rag.cli import serve
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.engines.vllm import serve as vllm_serve
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from tests.readme import blocks, commands


@pytest.fixture
def executed(monkeypatch):
    """What `serve` would have become."""
    commands = []
    monkeypatch.setattr(vllm_serve, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr(
        serve.os, "execve", lambda path, command, environment: commands.append(command)
    )
    return commands


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ((), False),
        (("--host", "::1"), False),
        (("--host", "localhost"), False),
        (("--host", "10.0.0.1"), True),
        (("--host", "gpu-3"), True),
        (("--host", "10.0.0.1", "--api-key=sesame"), False),
    ],
)
def test_serve_says_when_anyone_may_ask(cli, executed, monkeypatch, options, warned):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    outcome = cli("serve", "demo", *options)
    assert ("may ask, store, evict and release: set VLLM_API_KEY" in outcome.stderr) == warned
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert "may ask" not in cli("serve", "demo", *options).stderr


@pytest.mark.usefixtures("smollm2_folder")
def test_the_readmes_server_is_one(cli, executed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in commands("cacheblend-rag") if words[1] == "serve"]
    assert cli(*words[1:]).code == 0
    (program,) = [block for block in blocks("python") if "http://" in block]
    port = executed[0][executed[0].index("--port") + 1]
    assert f"http://127.0.0.1:{port}" in program


def test_serve_passes_on_what_it_does_not_know(cli, executed, tmp_path):
    options = ("--kv-path", tmp_path / "kv", "--disk-gib", 0.5, "--synchronous", "--port", 9001)
    steps = ("--slice-seconds", 0.05, "--step-tokens", 1024, "--guard", 0.02, "--find", "asked")
    flags = ("--dtype", "float32", "--enforce-eager", "-tp", "2")
    outcome = cli("serve", "demo", *options, *steps, *flags)
    assert outcome.code == 0, outcome.stderr
    [command] = executed
    assert command[-5:] == list(flags)
    assert command[command.index("--model") + 1] == str(MODEL_FOLDER)
    assert command[command.index("--served-model-name") + 1] == "demo"
    assert command[command.index("--port") + 1] == "9001"
    told = json.loads(command[command.index("--kv-transfer-config") + 1])
    told = told["kv_connector_extra_config"]
    assert told["kv_path"] == str(tmp_path / "kv")
    assert (told["disk_bytes"], told["asynchronous"], told["guard"]) == (1 << 29, False, 0.02)
    assert (told["slice_seconds"], told["step_tokens"], told["find"]) == (0.05, 1024, "asked")
    assert "memory only" not in outcome.stderr


def test_serve_reads_the_folder_of_chunk_kv_from_the_environment(
    cli, executed, tmp_path, monkeypatch
):
    monkeypatch.setenv("CACHEBLEND_KV_PATH", str(tmp_path / "kv"))
    for given, kept in ((), "kv"), (("--kv-path", tmp_path / "other"), "other"):
        assert cli("serve", "demo", *given).code == 0
        told = json.loads(executed[-1][executed[-1].index("--kv-transfer-config") + 1])
        assert told["kv_connector_extra_config"]["kv_path"] == str(tmp_path / kept)


def test_serve_settles_what_is_not_given_as_the_connector_does_and_shows_it(cli, executed):
    assert cli("serve", "demo").code == 0
    told = json.loads(executed[0][executed[0].index("--kv-transfer-config") + 1])
    settled = told["kv_connector_extra_config"]
    assert settled == ConnectorSettings().to_extra_config()
    shown = " ".join(cli("serve", "--help").stdout.replace("│", " ").split())
    for name in ("namespace", "attention", "step_tokens", "find"):
        assert f"[default: ({settled[name]})]" in shown


@pytest.mark.usefixtures("model_cache")
def test_serve_converts_a_gguf_file_and_tells_clients_no_folder(cli, executed, gguf_file):
    assert cli("serve", gguf_file).code == 0
    [command] = executed
    assert command[command.index("--model") + 1] == models.resolve(gguf_file)
    assert command[command.index("--served-model-name") + 1] == "tiny.F32"


def test_serve_says_what_is_wrong_in_one_line(cli, executed, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for arguments, said in (
        (("--dtype", "float32", "demo"), "comes before the model"),
        (("demo", "--kv-path", file / "kv"), "cannot be used"),
        (("demo", "--kv-transfer-config", "{}"), "set by cacheblend-rag"),
    ):
        outcome = cli("serve", *arguments)
        assert outcome.code == 2
        assert said in outcome.stderr
        assert outcome.stderr.count("\n") == 1
    assert executed == []


def test_serve_keeps_secrets_out_of_logs(cli, executed, caplog):
    caplog.set_level("DEBUG")
    outcome = cli("-vv", "serve", "demo", "--api-key", "sesame")
    assert executed[0][-2:] == ["--api-key", "sesame"]
    assert "sesame" not in outcome.stdout + outcome.stderr + caplog.text
    assert "memory only" in outcome.stderr


def test_a_port_in_use_is_told_before_anything_is_loaded(cli, executed, monkeypatch):
    """vLLM finds it after it has loaded the model, half a minute later, with a traceback."""
    monkeypatch.setattr(serve.checks, "check_model", None)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):  # noqa: S104
            outcome = cli("serve", "demo", "--host", host, "--port", port)
            assert outcome.code == 2
            assert f"port {port} of {host} is in use: stop what listens there" in outcome.stderr
            assert outcome.stderr.count("\n") == 1
    assert executed == []


def test_a_free_port_and_a_socket_file_are_not_refused(cli, executed):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert cli("serve", "demo", "--port", port, "--uds", "vllm.sock").code == 0
    assert cli("serve", "demo", "--port", port).code == 0
    assert len(executed) == 2
