"""Names of models: packaged, a GGUF file, a folder or a hub name.

``resolve`` returns the folder or hub name that transformers and vLLM load, ``public_name`` the name
in reports and servers. ``packaged`` lists the models that a command fetches.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models import converted, gguf, packaged

DEFAULT_MODEL = "smollm2"
"""The default model of commands: a packaged one, which has to be fetched."""
LOCAL_MODELS = "'smollm2' (packaged), a .gguf file or a folder in hub format"
"""The kinds of local model names, as listed in help texts and errors."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
SCHEME = "://"
"""Part of a storage URL, which vLLM reads by itself."""
OF_A_MODEL = ("config.json",)
OF_A_TOKENIZER = ("config.json", "tokenizer_config.json")
"""Files of a folder in hub format: it holds one of them."""


def resolve(name: str | Path, *, converts: bool = True, files: tuple[str, ...] = OF_A_MODEL) -> str:
    """Return the folder or hub name that transformers and vLLM load.

    Args:
        name: a packaged model (``smollm2``), a ``.gguf`` file, a folder in hub format, or a hub
            name. A GGUF file is converted into a folder the first time, which takes a while.
        converts: whether a GGUF file may be converted; else its name is returned.
        files: names of files, one of which a folder in hub format must hold.

    Raises:
        ModelLoadError: when a packaged model was not fetched, a local path holds no model, or a
            GGUF file cannot be converted.
    """
    text, path = str(name), _path(name)
    if text in packaged.MODELS:
        return str(packaged.fetched_folder(text))
    if path.is_file():
        if not gguf.is_gguf(path):
            raise ModelLoadError(
                f"model={text!r} is not a GGUF file: give a .gguf file or a folder in hub format"
            )
        return str(gguf.converted_folder(path, text)) if converts else text
    if gguf.has_suffix(path) and not path.exists():
        raise ModelLoadError(f"model={text!r}: there is no such file")
    if SCHEME in text or not is_local(text) or any((path / file).is_file() for file in files):
        return os.path.expanduser(text)
    if path.is_dir():
        raise ModelLoadError(
            f"model={text!r}: the folder holds no config.json; give a .gguf file by its own name, "
            "or a folder in hub format"
        )
    raise ModelLoadError(f"model={text!r}: there is no such folder")


def check(name: str | Path) -> None:
    """Raise ModelLoadError when a local path holds no model; nothing is loaded or converted."""
    resolve(name, converts=False)


def public_name(name: str) -> str:
    """Return a model's name in reports and servers.

    For a folder or file it is the last part, never the whole path; a hub name is unchanged.
    """
    path = _path(name)
    if name in packaged.MODELS or not is_local(name):
        return name
    if (record := converted.read_record(path)) is not None:
        return record.name
    return path.stem if gguf.has_suffix(path) else path.resolve().name or name


def is_local(name: str | Path) -> bool:
    """Whether a name refers to a local model: a packaged one, a file or a folder."""
    text = str(name)
    return text in packaged.MODELS or _path(name).exists() or not HUB_NAME.fullmatch(text)


def absolute(name: str) -> str:
    """Return a name that works from any working directory."""
    if name in packaged.MODELS or not _path(name).exists():
        return name
    return os.path.abspath(_path(name))


def _path(name: str | Path) -> Path:
    return Path(os.path.expanduser(name))
