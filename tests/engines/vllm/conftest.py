"""Tiny models saved as folders, and vLLM engines and servers over them; a start takes a while."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from tests.engines.vllm.forking import fork_engines
from tests.engines.vllm.opening import vllm_in_process
from tests.models import make_tokenizer, save_model
from tests.servers import redis, s3  # noqa: F401 - fixtures
from tests.vllm_server import RunningServer, running_server

if TYPE_CHECKING:
    from tests.engines.vllm.inprocess import InProcessEngine

WITHOUT_VLLM = {
    "connector/test_settings.py",
    "protocol/test_job.py",
    "protocol/test_result.py",
    "test_jobs.py",
    "test_connection.py",
    "middleware/test_access.py",
    "middleware/test_tenants.py",
    "test_serve.py",
}
HERE = Path(__file__).parent
if find_spec("vllm") is None:
    tests = (path.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py"))
    collect_ignore = [test for test in tests if test not in WITHOUT_VLLM]
else:
    fork_engines()

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

EngineFactory = Callable[..., VLLMEngine]
ServerFactory = Callable[..., RunningServer]
SERVER_FLAGS = ("--dtype", "float32", "--enforce-eager")
SHARED = ("few_blocks", "short_steps", "llama")
"""Fixtures whose vLLM is shared by all tests that follow one another."""
SHARING = ("test_attacks.py", "test_engine.py", "test_load.py")
"""Files that share them, beside those of the folder connector."""
IN_ORDER = (*SHARED, "of_one_rank")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have tests that share a vLLM follow one another."""
    ours = [item for item in items if HERE in item.path.parents]
    in_order = iter(sorted(ours, key=_turn))
    items[:] = [next(in_order) if HERE in item.path.parents else item for item in items]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, have files that share vLLMs and start few others in one process."""
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(super()._split_scope(nodeid))
            shares = HERE.name in file.parts and (
                file.parent.name == "connector" or file.name in SHARING
            )
            return "vLLMs that are shared" if shares else str(file)

    return Sharing(config, log) if config.getoption("dist") == "loadfile" else None


def _turn(item: pytest.Item) -> int:
    used = getattr(item, "fixturenames", ())
    return next((i for i, name in enumerate(IN_ORDER) if name in used), len(IN_ORDER))


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


@pytest.fixture(scope="session", autouse=True)
def _end_shared() -> Iterator[None]:
    yield
    if find_spec("vllm") is not None:
        from tests.engines.vllm.inprocess import LockstepVLLM

        LockstepVLLM.end_shared()


@pytest.fixture
def blend_config(request: pytest.FixtureRequest) -> BlendConfig:
    """The settings of engines over a shared vLLM: a module's CONFIG, where it has one."""
    return getattr(request.module, "CONFIG", BlendConfig(min_tokens=0, selector="hkvd"))


@pytest.fixture
def llama(
    model_folder: Callable[[str], Path], blend_config: BlendConfig
) -> Iterator[InProcessEngine]:
    """An empty engine over the one vLLM that most tests share."""
    yield from _over_shared("llama", model_folder("llama"), blend_config)


@pytest.fixture
def few_blocks(
    model_folder: Callable[[str], Path], blend_config: BlendConfig
) -> Iterator[InProcessEngine]:
    """An empty engine whose blocks are few: each has held another request's KV."""
    yield from _over_shared("few_blocks", model_folder("llama"), blend_config)


@pytest.fixture
def short_steps(
    model_folder: Callable[[str], Path], blend_config: BlendConfig
) -> Iterator[InProcessEngine]:
    """An empty engine with few tokens in a step, and small blocks in its kernels."""
    yield from _over_shared("short_steps", model_folder("llama"), blend_config)


def _over_shared(name: str, folder: Path, config: BlendConfig) -> Iterator[InProcessEngine]:
    from tests.engines.vllm.shared import shared_engine

    with shared_engine(name, folder, config) as engine:
        yield engine


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
