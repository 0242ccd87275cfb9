"""What makes chunk KV of two engines interchangeable: weights, precision, rope, shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ModelLoadError

SAMPLES_PER_WEIGHT = 16
SAMPLE_BYTES = 16
LONGEST_HEADER_BYTES = 1 << 28


def model_identity(
    weights: str, config: Any, dtype: str, *, rank: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """Return what KV depends on, for ``fingerprint``.

    weights: their hash. config: the model's Hugging Face config. dtype: such as ``float32``. rank,
    ranks: the tensor-parallel shard.
    """
    text = config.get_text_config()
    return {
        "weights": weights,
        "dtype": dtype,
        "model_type": config.model_type,
        "rope": _plain(getattr(text, "rope_parameters", None)),
        "vocabulary": int(text.vocab_size),
        "tensor_parallel": [rank, ranks],
    }


def weights_of(name: str | Path, revision: str | None = None) -> str:
    """Return a hash of a model's weights, from its safetensors files.

    It covers every tensor's name, shape and type and some of its bytes, so two models of one
    architecture differ in it, wherever they lie. Raises ModelLoadError when there are no such files
    on this machine.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_files(name, revision)):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > LONGEST_HEADER_BYTES:
                raise ModelLoadError(f"{path.name} of model {str(name)!r} is no safetensors file")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for tensor, entry in sorted(header.items()):
                first, end = entry["data_offsets"]
                digest.update(f"{tensor} {entry['dtype']} {entry['shape']} ".encode())
                step = max(1, (end - first) // SAMPLES_PER_WEIGHT)
                for offset in range(first, end, step):
                    file.seek(8 + size + offset)
                    digest.update(file.read(min(SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()


def _files(name: str | Path, revision: str | None) -> Iterator[Path]:
    from transformers.utils import cached_file

    folder = Path(name)
    if not folder.is_dir():
        config = cached_file(str(name), "config.json", revision=revision, local_files_only=True)
        if config is None:
            raise ModelLoadError(f"model {str(name)!r} is not on this machine")
        folder = Path(config).parent
    found = list(folder.glob("*.safetensors"))
    if not found:
        raise ModelLoadError(f"model {str(name)!r} has no safetensors files")
    yield from found


def _plain(value: Any) -> Any:
    """Return JSON values, so that two libraries' containers of the same numbers agree."""
    return json.loads(json.dumps(value, sort_keys=True, default=str))
