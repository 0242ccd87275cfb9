"""Tiny models saved as folders, and vLLM engines and servers over them; a start takes a while."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.serve import RunningServer, running_server
from tests.engines.vllm.forking import fork_engines
from tests.engines.vllm.opening import vllm_in_process
from tests.models import make_tokenizer, save_model
from tests.servers import redis, s3  # noqa: F401 - fixtures

WITHOUT_VLLM = {
    "connector/test_settings.py",
    "protocol/test_job.py",
    "protocol/test_result.py",
    "test_connection.py",
    "middleware/test_access.py",
    "test_serve.py",
}
if find_spec("vllm") is None:
    here = Path(__file__).parent
    tests = (path.relative_to(here).as_posix() for path in here.rglob("test_*.py"))
    collect_ignore = [test for test in tests if test not in WITHOUT_VLLM]
else:
    fork_engines()

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

EngineFactory = Callable[..., VLLMEngine]
ServerFactory = Callable[..., RunningServer]
SERVER_FLAGS = ("--dtype", "float32", "--enforce-eager")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a model family to a folder with a random model of it."""
    base = tmp_path_factory.mktemp("models")

    def save(family: str) -> Path:
        folder = base / family
        if not folder.exists():
            save_model(family, folder, head_dim=64)
            make_tokenizer().save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def open_vllm(model_folder: Callable[[str], Path]) -> Iterator[EngineFactory]:
    """Open engines; all are closed at the end of the module."""
    opened: list[VLLMEngine] = []

    def open_engine(family: str = "llama", **options: Any) -> VLLMEngine:
        arguments: dict[str, Any] = {
            "config": BlendConfig(min_tokens=0, selector="hkvd"),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "disable_log_stats": True,
        }
        engine = vllm_in_process(model_folder(family), **{**arguments, **options})
        opened.append(engine)
        return engine

    yield open_engine
    for engine in opened:
        if engine.is_open:
            engine.close()


@pytest.fixture(scope="module")
def start_server() -> Iterator[ServerFactory]:
    """Start servers of a folder's model; all are ended at the end of the module."""
    with ExitStack() as running:

        def start(folder: Path, *flags: str, **options: Any) -> RunningServer:
            server = running_server(folder, flags=(*SERVER_FLAGS, *flags), **options)
            return running.enter_context(server)

        yield start


@pytest.fixture(scope="module")
def engine(open_vllm: EngineFactory) -> VLLMEngine:
    """The engine most tests of a module share."""
    return open_vllm()
