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


def resolve(name: str | Path, *, converts: bool = True) -> str:
    """Return the folder or hub name that transformers and vLLM load.

    Args:
        name: a packaged model (``smollm2``), a ``.gguf`` file, a folder that
            holds one, a folder in hub format, or a hub name. A GGUF file is converted into a folder
            the first time, which takes a while.
        converts: whether a GGUF file may be converted; else its name is returned.

    Raises:
        ModelLoadError: when a packaged model was not fetched, a local path holds no model, or a
            GGUF file cannot be converted.
    """
    text = str(name)
    if text in packaged.MODELS:
        return str(packaged.fetched_folder(text))
    path = Path(os.path.expanduser(name))
    if (file := _gguf_file(path, text)) is not None:
        return str(gguf.converted_folder(file, text)) if converts else text
    _check_folder(path, text)
    return os.path.expanduser(text)


def tokenizer_source(name: str | Path) -> str:
    """Return the folder or hub name that transformers loads a tokenizer from.

    Args:
        name: as for ``resolve``, or a folder that holds only a tokenizer.

    Raises:
        ModelLoadError: as ``resolve`` does.
    """
    text, folder = str(name), Path(os.path.expanduser(name))
    if text in packaged.MODELS or not (folder / "tokenizer_config.json").is_file():
        return resolve(name)
    return str(folder) if _gguf_file(folder, text) is None else resolve(name)


def check(name: str | Path) -> None:
    """Raise ModelLoadError when a local path holds no model; nothing is loaded or converted."""
    resolve(name, converts=False)


def public_name(name: str) -> str:
    """Return a model's name in reports and servers.

    For a folder or file it is the last part, never the whole path; a hub name is unchanged.
    """
    path = Path(os.path.expanduser(name))
    if name in packaged.MODELS or not is_local(name):
        return name
    if (record := converted.read_record(path)) is not None:
        return record.name
    return gguf.stem(path.name) or path.resolve().name or name


def is_local(name: str | Path) -> bool:
    """Whether a name refers to a local model: a packaged one, a file or a folder."""
    text = str(name)
    if text in packaged.MODELS:
        return True
    return Path(os.path.expanduser(name)).exists() or not HUB_NAME.fullmatch(text)


def absolute(name: str) -> str:
    """Return a name that works from any working directory."""
    path = Path(os.path.expanduser(name))
    if name in packaged.MODELS or not path.exists():
        return name
    return os.path.abspath(path)


def _gguf_file(path: Path, name: str) -> Path | None:
    """Return the GGUF file that a name refers to, None for other names."""
    if path.is_file():
        if not gguf.is_gguf(path):
            raise ModelLoadError(
                f"model={name!r} is not a GGUF file: give a .gguf file or a folder in hub format"
            )
        return path
    if not path.is_dir():
        if gguf.stem(path.name) is not None:
            raise ModelLoadError(f"model={name!r}: there is no such file")
        return None
    if (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.iterdir() if gguf.stem(file.name) is not None)
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise ModelLoadError(
            f"model={name!r}: the folder holds {len(files)} GGUF files ({names}): name one of them"
        )
    return files[0] if files else None


def _check_folder(path: Path, name: str) -> None:
    if SCHEME in name:
        return
    if is_local(name) and not path.is_dir():
        raise ModelLoadError(f"model={name!r}: there is no such folder")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"model={name!r}: the folder holds no config.json and no .gguf file; give a model in "
            "hub format"
        )
