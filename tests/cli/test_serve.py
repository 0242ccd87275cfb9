"""`serve`: what it becomes, and errors of one line."""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from cacheblend_rag import models
from cacheblend_rag.api import app
from cacheblend_rag.cli import serve, serve_vllm
from cacheblend_rag.engines import factory
from cacheblend_rag.engines.vllm import serve as vllm_serve
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from tests.toy import TOY

ON_VLLM = ("--engine", "vllm")


@pytest.fixture
def executed(monkeypatch):
    """What `serve` would have become."""
    commands = []
    monkeypatch.setattr(vllm_serve, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr(
        serve_vllm.os, "execve", lambda path, command, environment: commands.append(command)
    )
    return commands


@pytest.fixture
def served_here(monkeypatch):
    """What `serve` would have served in this process, after its checks."""
    served = []
    monkeypatch.setattr(serve.asking, "load_engine", lambda config, _: served.append(config))
    monkeypatch.setattr(serve, "closing", lambda _: nullcontext())
    monkeypatch.setattr(serve, "_run", lambda address, name, _: served.append((address, name)))
    monkeypatch.setattr(app, "create_app", lambda *_, **__: None)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("CACHEBLEND_MAX_BODY_MIB", "1")
    monkeypatch.setenv("CACHEBLEND_ALLOWED_HOSTS", "")
    return served


def test_without_a_gpu_the_embedded_engine_is_served(cli, executed, served_here, tmp_path):
    options = ("--port", 9001, "--kv-path", tmp_path / "kv")
    names = (
        "namespace=mine",
        "guard=0.5",
        "profile=speed",
        "dtype=float16",
        "max_body_mib=3",
        "disk_bytes=1GiB",
    )
    for engine in ((), ("--engine", "transformers")):
        assert cli("serve", TOY, *engine, *options, *set_to(*names)).code == 0
        config, (address, name) = served_here[-2:]
        assert (config.engine, config.model, config.dtype) == ("transformers", TOY, "float16")
        assert (config.namespace, config.profile.name) == ("mine", "speed")
        assert (config.guard.sample_share, config.fill_on_miss) == (0.5, True)
        assert (config.store.kv_path, config.store.disk_bytes) == (str(tmp_path / "kv"), 1 << 30)
        assert (address.host, address.port, address.max_body_mib) == ("127.0.0.1", 9001, 3)
        assert name == "toy"
    assert executed == []


def set_to(*given):
    """The options that give settings by their names."""
    return [part for text in given for part in ("--set", text)]


@pytest.mark.usefixtures("smollm2_folder")
def test_smollm2_is_served_if_no_model_is_named(cli, executed, served_here):
    assert cli("serve", "--engine", "transformers").code == 0
    assert served_here[0].model == "smollm2"


def test_vllm_is_served_where_it_can_run(cli, executed, served_here, monkeypatch):
    monkeypatch.setattr(factory, "pick_engine", lambda config: "vllm")
    assert cli("serve", TOY, "--max-num-seqs", "4").code == 0
    assert (len(executed), served_here) == (1, [])


def test_other_machines_need_a_key_to_reach_the_embedded_engine(cli, served_here, monkeypatch):
    asked = ("serve", TOY, "--engine", "transformers", "--host", "10.0.0.1")
    refused = cli(*asked)
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    assert "set VLLM_API_KEY to a key that clients must send" in refused.stderr
    assert served_here == []
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setattr(serve.serve, "check_port", lambda *_: None)
    assert cli(*asked).code == 0
    assert served_here


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
    outcome = cli("serve", TOY, *ON_VLLM, *options)
    assert ("may ask, store, evict and release: set VLLM_API_KEY" in outcome.stderr) == warned
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert "may ask" not in cli("serve", TOY, *ON_VLLM, *options).stderr


def test_further_names_of_the_server_are_for_the_middleware(
    cli, executed, served_here, monkeypatch, tmp_path
):
    told = {}
    monkeypatch.setattr(serve_vllm.os, "execve", lambda *given: told.update(given[-1]))
    names = ("--allowed-host", "gpu.example", "--allowed-host", "::2")
    assert cli("serve", TOY, *ON_VLLM, *names).code == 0
    assert told["CACHEBLEND_ALLOWED_HOSTS"] == "127.0.0.1,gpu.example,::2"
    assert cli("serve", TOY, "--engine", "transformers", *names).code == 0
    assert os.environ["CACHEBLEND_ALLOWED_HOSTS"] == "127.0.0.1,gpu.example,::2"
    for wrong in ("http://gpu.example", "gpu.example:80", "", "*", "a,b", "a/b", "a b"):
        outcome = cli("serve", TOY, *ON_VLLM, "--allowed-host", wrong)
        assert outcome.code != 0, wrong
        assert f"--allowed-host {wrong!r} must be a name or an address" in outcome.stderr


def test_serve_passes_on_what_it_does_not_know(cli, executed, tmp_path):
    options = ("--kv-path", tmp_path / "kv", "--port", 9001)
    names = ("guard=0.02", "find=asked", "disk_bytes=0.5GiB", "slice_seconds=0.05", "profile=speed")
    flags = ("--dtype", "float32", "--enforce-eager", "-tp", "2")
    outcome = cli("serve", TOY, *ON_VLLM, *options, *set_to(*names), *flags)
    assert outcome.code == 0, outcome.stderr
    [command] = executed
    assert command[-5:] == list(flags)
    assert command[command.index("--model") + 1] == TOY
    assert command[command.index("--served-model-name") + 1] == "toy"
    assert command[command.index("--port") + 1] == "9001"
    told = json.loads(command[command.index("--kv-transfer-config") + 1])
    told = told["kv_connector_extra_config"]
    assert told["kv_path"] == str(tmp_path / "kv")
    assert (told["disk_bytes"], told["guard"]) == (1 << 29, 0.02)
    assert (told["slice_seconds"], told["find"]) == (0.05, "asked")
    assert told["profile"]["name"] == "speed"
    assert "memory only" not in outcome.stderr


@pytest.mark.parametrize(
    ("template", "given", "told"),
    [
        ('<tool_call>\n{"name": ', (), "hermes"),
        ("<tool_call>\n<function=", (), "qwen3_coder"),
        ("[TOOL_CALLS]", (), "mistral"),
        ("<|start_header_id|>ipython<|end_header_id|>", (), "llama3_json"),
        ({"default": "", "tool_use": "<tool_call>"}, (), "hermes"),
        ("[TOOL_CALLS]", ("--chat-template", "<tool_call>"), "hermes"),
        ("[TOOL_CALLS]", ("--enable-auto-tool-choice", "--tool_call_parser=xlam"), "xlam"),
        ("[TOOL_CALLS]", ("--no-enable-auto-tool-choice",), None),
        (None, (), None),
    ],
)
def test_vllms_parser_of_tool_calls_is_that_of_the_chat_template(
    cli, executed, monkeypatch, template, given, told
):
    tokenizer = SimpleNamespace(chat_template=template)
    monkeypatch.setattr(serve_vllm, "load_tokenizer", lambda model, trust_remote_code: tokenizer)
    outcome = cli("serve", TOY, *ON_VLLM, *given)
    assert vllm_serve.flag_value(executed[0], ("--tool-call-parser",)) == told
    assert executed[0].count("--enable-auto-tool-choice") == (told is not None)
    assert ("requests with tools are refused" in outcome.stderr) == (template is None)


def test_vllm_has_the_parsers_of_tool_calls():
    found = find_spec("vllm") or pytest.skip("vLLM is not installed")
    vllm = Path(found.origin).parent
    registry = (vllm / "tool_parsers" / "__init__.py").read_text()
    assert [one for one in serve_vllm.TOOL_PARSERS.values() if f'"{one}": (' not in registry] == []


def test_serve_reads_the_folder_of_chunk_kv_from_the_environment(
    cli, executed, tmp_path, monkeypatch
):
    monkeypatch.setenv("CACHEBLEND_KV_PATH", str(tmp_path / "kv"))
    for given, kept in ((), "kv"), (("--kv-path", tmp_path / "other"), "other"):
        assert cli("serve", TOY, *ON_VLLM, *given).code == 0
        told = json.loads(executed[-1][executed[-1].index("--kv-transfer-config") + 1])
        assert told["kv_connector_extra_config"]["kv_path"] == str(tmp_path / kept)


def test_serve_settles_what_is_not_given_as_the_connector_does(cli, executed):
    assert cli("serve", TOY, *ON_VLLM).code == 0
    told = json.loads(executed[0][executed[0].index("--kv-transfer-config") + 1])
    settled = told["kv_connector_extra_config"]
    assert settled == ConnectorSettings().to_extra_config()


@pytest.mark.usefixtures("model_cache")
def test_serve_converts_a_gguf_file_and_tells_clients_no_folder(cli, executed, gguf_file):
    assert cli("serve", gguf_file, *ON_VLLM).code == 0
    [command] = executed
    assert command[command.index("--model") + 1] == models.resolve(gguf_file)
    assert command[command.index("--served-model-name") + 1] == "tiny.F32"


def test_serve_keeps_secrets_out_of_logs(cli, executed, caplog):
    caplog.set_level("DEBUG")
    outcome = cli("-vv", "serve", TOY, *ON_VLLM, "--api-key", "sesame")
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
            outcome = cli("serve", TOY, *ON_VLLM, "--host", host, "--port", port)
            assert outcome.code == 2
            assert f"port {port} of {host} is in use: stop what listens there" in outcome.stderr
            assert outcome.stderr.count("\n") == 1
    assert executed == []


def test_a_free_port_and_a_socket_file_are_not_refused(cli, executed):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert cli("serve", TOY, *ON_VLLM, "--port", port, "--uds", "vllm.sock").code == 0
    assert cli("serve", TOY, *ON_VLLM, "--port", port).code == 0
    assert len(executed) == 2


def test_serve_with_tenants(cli, executed, tmp_path, monkeypatch):
    environments = []
    monkeypatch.setattr(
        serve_vllm.os,
        "execve",
        lambda path, command, environment: (
            executed.append(command),
            environments.append(environment),
        ),
    )
    for name in ("VLLM_API_KEY", "CACHEBLEND_STORE_KEY", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    made = cli("serve", "--new-key", "acme")
    (tmp_path / "tenants.toml").write_text(made.stdout)
    keys = [line.rpartition(" ")[2] for line in made.stderr.splitlines()]
    assert len(keys) == 2
    assert not any(key in made.stdout for key in keys)
    outcome = cli("-vv", "serve", TOY, *ON_VLLM, "--host", "10.0.0.1", "--tenants", "tenants.toml")
    assert outcome.code == 0
    assert "may ask" not in outcome.stderr, "each needs a key"
    settings = json.loads(executed[0][executed[0].index("--kv-transfer-config") + 1])
    assert settings["kv_connector_extra_config"]["tenants"] is True
    (told,) = environments
    assert told["CACHEBLEND_TENANTS"] == str(tmp_path / "tenants.toml")
    cli("serve", TOY, *ON_VLLM)
    assert "CACHEBLEND_TENANTS" not in environments[-1]
    monkeypatch.setenv("VLLM_API_KEY", keys[0])
    for arguments, said in (
        (("--tenants", "none.toml"), "none.toml cannot be read"),
        (("--tenants", "tenants.toml", *set_to("namespace=x")), "leave --set namespace out"),
        (("--tenants", "tenants.toml"), "is the server's own key: make another"),
    ):
        refused = cli("serve", TOY, *ON_VLLM, *arguments)
        assert refused.code == 2
        assert said in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert len(executed) == 2


def test_serve_names_the_plugins_that_vllm_would_load_without_a_list(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = {"vllm.general_plugins": ["lora", "x"], "vllm.platform_plugins": ["npu"]}
    monkeypatch.setattr(
        vllm_serve,
        "entry_points",
        lambda group: [SimpleNamespace(name=name) for name in found.get(group, ())],
    )
    assert vllm_serve.server_environment() == {"VLLM_PLUGINS": "cacheblend,lora,npu,x"}
    monkeypatch.setenv("VLLM_PLUGINS", "x")
    assert vllm_serve.server_environment() == {"VLLM_PLUGINS": "cacheblend,x"}
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert vllm_serve.server_environment() == {"VLLM_PLUGINS": "cacheblend"}


def test_a_tenants_name_that_cannot_be_one_is_refused(cli):
    for name in ("", " ", "a\nb", "x" * 201):
        outcome = cli("serve", "--new-key", name)
        assert (outcome.code, outcome.stdout) == (2, "")
        assert "printable characters" in outcome.stderr
