"""Converts GGUF files into folders in hub format.

The engines load safetensors; a GGUF file is converted once, into the folder of converted models.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.models import converted
from cacheblend_rag.models.gguf.header import HUB_FORMAT, CannotConvertError, read_header

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
SUFFIX = ".gguf"
PANIC = "PanicException"
"""A failed assertion of a Rust library, which cannot be imported and is no Exception."""


def is_gguf(path: Path) -> bool:
    """Whether a file begins with GGUF's magic bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def stem(file_name: str) -> str | None:
    """Return a GGUF file's name without ``.gguf``; None for other names."""
    return file_name[: -len(SUFFIX)] if file_name.lower().endswith(SUFFIX) else None


def converted_folder(file: Path, name: str) -> Path:
    """Return the folder that a GGUF file was converted into; converts it the first time.

    name: as the user gave it, for messages. Equal content is converted once, whatever its path.
    Raises ModelLoadError when it cannot be converted.
    """
    state = converted.FileState.of(file)
    for folder, record in converted.converted_models():
        if state in record.files:
            return folder
    folder = converted.models_folder() / f"gguf-{_digest(file)[:32]}-{converted.FORMAT}"
    if not folder.is_dir():
        logger.info("converting %s, once", file.name)
    record = converted.Record(stem(file.name) or file.name, state.path, (state,))
    converted.make_once(folder, record, lambda target: convert(file, target, name))
    converted.add_file(folder, state)
    return folder


def convert(file: Path, folder: Path, name: str) -> None:
    """Write a GGUF file's model into a folder in hub format.

    Raises ModelLoadError, naming the reason, when it cannot be converted.
    """
    from cacheblend_rag.models.gguf.tokenizer import save_tokenizer
    from cacheblend_rag.models.gguf.weights import save_weights

    try:
        header = read_header(file)
        with _alone(file) as linked:
            end_tokens = save_tokenizer(linked, header, folder)
            save_weights(linked, header, folder, end_tokens)
    except CannotConvertError as error:
        raise ModelLoadError(f"model={name!r}: {first_line(error)}") from error
    except OSError as error:
        raise ModelLoadError(
            f"model={name!r}: the converted model cannot be written: {first_line(error)}: free "
            f"space or set {converted.VARIABLE} to another folder"
        ) from error
    except BaseException as error:  # of transformers and Rust libraries, of many kinds
        if not (isinstance(error, Exception) or type(error).__name__ == PANIC):
            raise
        raise ModelLoadError(
            f"model={name!r}: its conversion failed ({type(error).__name__}: {first_line(error)}): "
            f"{HUB_FORMAT}"
        ) from error


@contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """Yield a link to a file in a folder that holds nothing else.

    transformers also reads tokenizer, templates and adapter settings from a GGUF file's folder,
    which may belong to another model.
    """
    with tempfile.TemporaryDirectory(prefix="cacheblend-") as folder:
        link = Path(folder) / f"model{SUFFIX}"
        link.symlink_to(file.resolve())
        yield link


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
