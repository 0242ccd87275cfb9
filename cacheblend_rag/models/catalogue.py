"""Lists the packaged models, and converted GGUF files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.models import converted, packaged


@dataclass(frozen=True)
class KnownModel:
    """A packaged or converted model.

    kind: packaged or gguf. source: the package or file it comes from. nbytes: of its
    folder; None if it was not fetched, like ``folder``. licence: None if unknown.
    """

    name: str
    kind: str
    title: str
    licence: str | None
    source: str
    nbytes: int | None
    folder: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "folder": self.folder and str(self.folder)}


def all_models() -> list[KnownModel]:
    """Return the packaged models, and the converted ones."""
    return [*map(_packaged, packaged.MODELS.values()), *_from_files()]


def _packaged(model: packaged.PackagedModel) -> KnownModel:
    folder = model.folder if model.folder.is_dir() else None
    return KnownModel(
        name=model.name,
        kind="packaged",
        title=f"{model.title}, weights {model.weights}",
        licence=model.licence,
        source=model.source,
        nbytes=None if folder is None else converted.size_of(folder),
        folder=folder,
    )


def _from_files() -> list[KnownModel]:
    packages = {model.folder for model in packaged.MODELS.values()}
    return [
        KnownModel(
            name=record.name,
            kind="gguf",
            title=f"made from {record.source}",
            licence=None,
            source=record.source,
            nbytes=converted.size_of(folder),
            folder=folder,
        )
        for folder, record in converted.converted_models()
        if folder not in packages
    ]
