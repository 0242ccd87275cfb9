"""Whatever a store, a model's file or a settings file holds: an answer, or an error in a line."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from cacheblend_rag import (
    BlendConfig,
    ConfigError,
    Engine,
    Generation,
    ModelLoadError,
    SamplingParams,
    TransformersEngine,
    UnsupportedModelError,
    open_engine,
)
from tests.contracts.places import Place, Servers
from tests.contracts.wire import cut
from tests.model_names.tiny_gguf import tiny_llama, write_gguf
from tests.models import make_model, make_tokenizer, words

CASES = int(os.environ.get("CACHEBLEND_TEST_CASES", "60"))

# Stored objects

REUSE = BlendConfig(recompute_ratio=0.0, min_tokens=0, cost_model=False, reuse_prefix=False)
CHUNK = words(40, seed=1)
PROMPT = f"{words(5, seed=2)} {CHUNK} {words(3, seed=3)}"
LIKELY = SamplingParams(max_tokens=2, logprobs=0, temperature=0.0)


SHARES = {"disk": 1.0, "redis": 0.3, "s3": 0.15}
"""Of CASES that are tried in each kind of place."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as started:
        yield started


@pytest.fixture(params=SHARES)
def place(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Place:
    return servers.place(request.param, tmp_path / "kv")


@pytest.fixture
def engine(place: Place) -> Iterator[Engine]:
    given = {"model": make_model(), "tokenizer": make_tokenizer(), "config": REUSE}
    with closing(open_engine("transformers", **given, tiers=[place.url("timeout=60")])) as opened:
        yield opened


def stored(engine: Engine, place: Place) -> tuple[str, bytes]:
    """Store the chunk, and return the name of its object with its bytes."""
    engine.precompute([CHUNK], progress=False)
    ((name, value),) = place.objects().items()
    return name, value


def likely(answer: Generation) -> list[float]:
    assert answer.logprobs is not None
    return [token.logprob for token in answer.logprobs]


def test_a_stored_object_is_used_as_it_was_stored_or_not_at_all(
    engine: Engine, place: Place
) -> None:
    """Whatever of it is changed: then the answer is that of ordinary prefill, and says why."""
    draw, told = random.Random(5), Counter[str]()
    stored(engine, place)
    used, full = (likely(ask(PROMPT, LIKELY)) for ask in (engine.generate, engine.generate_full))
    assert used != full
    for _ in range(round(CASES * SHARES[place.kind])):
        name, value = stored(engine, place)
        begin = draw.choice([len(value), 1024])
        place.put(name, cut(value[:begin], draw) + value[begin:])
        answer = engine.generate(PROMPT, LIKELY)
        (chunk,) = answer.report.chunks
        told[str(chunk.reason)] += 1
        assert likely(answer) == (used if chunk.hit else full)
        assert chunk.hit == (chunk.reason is None)
    assert told["damaged"] > sum(told.values()) / 2
    stored(engine, place)
    assert likely(engine.generate(PROMPT, LIKELY)) == used


def test_a_number_of_a_stored_head_that_is_another_is_not_used(
    engine: Engine, place: Place
) -> None:
    """Such as where the chunk stood, how many tokens it has, and where its bytes are."""
    name, value = stored(engine, place)
    numbers = [*re.finditer(rb'(?<=["\[,])[0-9]{1,9}(?=["\],])', value[:2048])]
    assert len(numbers) > 5
    for number in numbers:
        at = number.end() - 1
        other = b"1" if value[at : at + 1] == b"0" else b"0"
        place.put(name, value[:at] + other + value[at + 1 :])
        (chunk,) = engine.generate(PROMPT, LIKELY).report.chunks
        assert not chunk.hit, number
        assert engine.precompute([CHUNK], progress=False).computed == 1


# GGUF files

Patch = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama()).read_bytes()


@pytest.fixture(autouse=True)
def _converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_MODELS", str(tmp_path / "converted"))


def refused(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(ModelLoadError) as failure:
        TransformersEngine(file)
    line = str(failure.value)
    assert line.startswith(f"model={str(file)!r}: ")
    assert "\n" not in line
    return line


def after(key: str, held: str, value: str, *numbers: int) -> Patch:
    """A patch of the number, or of the array's type and length, that follows a key's type."""

    def patched(data: bytes) -> bytes:
        place = data.index(struct.pack("<Q", len(key)) + key.encode()) + 12 + len(key)
        assert len(data[place:]) > struct.calcsize(held)
        return data[:place] + struct.pack(value, *numbers) + data[place + struct.calcsize(held) :]

    return patched


def with_count(place: int, count: int) -> Patch:
    return lambda data: data[:place] + struct.pack("<Q", count) + data[place + 8 :]


def at_one_place(data: bytes) -> bytes:
    """The last tensor in the table, of 64 numbers, becomes the first one's 17,000."""
    place = data.index(b"blk.1.ffn_norm.weight")
    first = data.index(b"token_embd.weight") + len(b"token_embd.weight")
    return data[: place + 21] + data[first : first + 32] + data[place + 21 + 24 :]


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (with_count(8, 1 << 60), "1152921504606846976 items are announced at byte 16 of "),
        (with_count(16, 1 << 40), "1099511627776 items are announced"),
        (after("tokenizer.ggml.token_type", "<IQ", "<IQ", 0, 1 << 40), "1099511627776 items"),
        (after("tokenizer.ggml.tokens", "<IQ", "<IQ", 8, 1 << 40), "1099511627776 items"),
        (after("tokenizer.ggml.tokens", "<IQQ", "<IQQ", 8, 264, 1 << 40), "1099511627776 bytes"),
        (after("general.architecture", "<Q", "<Q", 1 << 63), "9223372036854775808 bytes are"),
        (at_one_place, "tensors overlap"),
        (after("token_embd.weight", "<QQ", "<QQ", 1 << 40, 1 << 40), "ends beyond the file's"),
        (after("token_embd.weight", "<QQ", "<QQ", 1 << 62, 4), "ends beyond the file's"),
        (after("llama.block_count", "<I", "<I", 1 << 31), "llama.block_count=2147483648 does not"),
        (after("llama.vocab_size", "<I", "<I", 1 << 31), "llama.vocab_size=2147483648 does not"),
        (after("llama.embedding_length", "<I", "<I", 128), "191,104 of 95,552 values"),
        (lambda data: data.replace(b"1 2", b"1 3", 1), "its tokenizer merges '1' and '3'"),
        (lambda data: data[: len(data) // 3], "is damaged or incomplete"),
    ],
)
def test_no_number_of_a_model_file_is_believed(
    gguf: bytes, tmp_path: Path, patch: Patch, reason: str
) -> None:
    assert reason in refused(tmp_path / "hostile.gguf", patch(gguf))


def test_a_model_file_is_loaded_or_refused_in_a_line_and_takes_no_memory(
    gguf: bytes, tmp_path: Path
) -> None:
    draw, read = random.Random(7), 0
    header = gguf.index(b"output_norm.weight") + 64
    for case in range(CASES // 6):
        file = tmp_path / f"{case}.gguf"
        file.write_bytes(cut(gguf[:header], draw) + gguf[header:])
        said, peak = opened(file)
        assert not said or str(file) in said
        assert "\n" not in said
        assert peak < 64 << 20
        read += not said
    assert 0 < read < CASES // 6


def opened(file: Path) -> tuple[str, int]:
    """Return why a model's file is refused, "" if it is not, and the most memory that it took."""
    tracemalloc.start()
    try:
        TransformersEngine(file).close()
    except (ModelLoadError, UnsupportedModelError) as error:
        return str(error), tracemalloc.get_traced_memory()[1]
    else:
        return "", tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Profiles and tenants

PROFILE = """\
name = "mine"
model = "smollm2"
[blend]
selector = "hkvd"
recompute_ratio = 0.16
min_tokens = 64
[lead_in]
kind = "document"
document_window = 512
"""


def test_a_profile_is_read_or_refused_in_a_line(tmp_path: Path) -> None:
    draw, told = random.Random(3), Counter[str]()
    file, nowhere = tmp_path / "profile.toml", tmp_path / "none.gguf"
    for _ in range(CASES):
        file.write_bytes(cut(PROFILE.encode(), draw))
        with pytest.raises((ConfigError, ModelLoadError)) as error:
            open_engine("transformers", model=nowhere, profile=file)
        told[type(error.value).__name__] += 1
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 600
    assert min(told["ConfigError"], told["ModelLoadError"]) > CASES // 20


HASH = sha256(b"acme asks").hexdigest()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[acme", "is not TOML: "),
        (b"\xff", ""),
        (b"acme = 1", '["acme"] must have ask = and store ='),
        (b'[acme]\nask = "secret"', 'ask of ["acme"] must be the SHA-256 of a key, 64 hex digits'),
        (f'[acme]\nask = "{HASH}"\nstore = "{HASH}"'.encode(), 'store of ["acme"] occurs twice'),
        (f'[acme]\nask = "{HASH}"'.encode(), 'ask of ["acme"] is the server\'s own key'),
    ],
)
def test_a_wrong_file_of_tenants_is_refused_by_its_field(
    tmp_path: Path, text: bytes, said: str
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_bytes(text)
    own = {"VLLM_API_KEY": "acme asks"} if "own key" in said else {}
    command = [sys.executable, "-m", "cacheblend_rag", "serve", "none", "--tenants", str(file)]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **own}, timeout=120
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert str(file) in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "secret" not in ended.stderr, "what stands where a hash should is perhaps a key"
