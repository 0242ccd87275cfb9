"""Computes the identity of a model's KV, and records which model a fingerprint belongs to."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.folders import make_folder, write_private
from cacheblend_rag.settings import LeadInConfig, Precision

SAMPLES_PER_WEIGHT = 16
HARMLESS = frozenset(
    {
        # what the model is called, where it comes from, and what is done with its outputs
        "architectures", "transformers_version", "id2label", "label2id", "problem_type",
        "task_params", "output_attentions", "output_hidden_states", "output_router_logits",
        "return_dict", "use_cache", "dtype", "torch_dtype",
        # tokens by their roles: chunk ids say which tokens there are
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        # training
        "initializer_range", "router_aux_loss_coef", "attention_dropout", "hidden_dropout",
        "dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "emb_pdrop", "activation_dropout",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop", "pretraining_tp",
    }
)  # fmt: skip
"""Settings of a model's config that KV does not depend on; every other one counts."""


def model_identity(
    weights: str,
    config: Any,
    dtype: torch.dtype,
    *,
    keys: Sequence[int],
    rank: int = 0,
    ranks: int = 1,
    precision: Precision = "native",
) -> dict[str, Any]:
    """Return everything that KV depends on, for ``fingerprint``.

    weights: their hash. config: the model's Hugging Face config; its whole text part counts, except
    HARMLESS settings. dtype: the model's. keys: the result of ``key_traits``, since two libraries
    may interpret one config differently. rank, ranks: the tensor-parallel shard. precision: to
    which the store rounds.
    """
    text = config.get_text_config()
    return {
        "weights": weights,
        "dtype": str(dtype).removeprefix("torch."),
        "model_type": config.model_type,
        "settings": _settings(text),
        "vocabulary": int(text.vocab_size),
        "keys": list(keys),
        "tensor_parallel": [rank, ranks],
        "precision": precision,
    }


def _settings(config: Any) -> dict[str, Any]:
    named = {
        name: value
        for name, value in config.to_dict().items()
        if name not in HARMLESS and not name.startswith("_")
    }
    plain: dict[str, Any] = json.loads(json.dumps(named, sort_keys=True, default=str))
    return plain


def weights_hash(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    """Return a hash of named weights: of each one's name, shape and some values in ``dtype``."""
    digests = {}
    for weight_name, whole in weights:
        for name, weight in stored_parts(weight_name, whole.detach()):
            flat = weight.reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLES_PER_WEIGHT)]
            digests[name] = _digest(name, list(weight.shape), sample, dtype)
    text = json.dumps(sorted(digests.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stored_parts(name: str, weight: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight: quantized ones consist of codes and scales."""
    if not hasattr(weight, "__tensor_flatten__"):
        yield name, weight
        return
    for part in weight.__tensor_flatten__()[0]:
        yield from stored_parts(f"{name}.{part}", getattr(weight, part))


def weights_in_files(name: str | Path, dtype: torch.dtype, revision: str | None = None) -> str:
    """Return a hash of a model's weights, from its safetensors files.

    It covers every tensor's name, shape and some of its values in ``dtype``, so two models of one
    architecture differ in it, and one model has the same hash wherever it lies and however it is
    sharded; in memory, too, unless its tensors are renamed on loading. Raises ModelLoadError when
    there are no such files on this machine, or when they are an adapter of another model.
    """
    return weights_hash(_tensors_in(_files(name, revision)), dtype)


def _tensors_in(paths: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of files, which are mapped: only values that are looked at are read."""
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{path.name} is no safetensors file: {error}") from error


def _digest(name: str, shape: Sequence[int], sample: Tensor, dtype: torch.dtype) -> str:
    if sample.is_floating_point():
        sample = sample.to(dtype).float()
    values = sample.cpu().numpy().tobytes()
    text = f"{name} {list(shape)} ".encode()
    return hashlib.blake2b(text + values, digest_size=16).hexdigest()


def _files(name: str | Path, revision: str | None) -> list[Path]:
    from transformers.utils import cached_file

    folder = Path(name)
    if not folder.is_dir():
        try:
            config = cached_file(str(name), "config.json", revision=revision, local_files_only=True)
        except OSError as error:
            raise ModelLoadError(f"model {str(name)!r} must be downloaded first") from error
        folder = Path(str(config)).parent
    if (folder / "adapter_config.json").exists():
        raise ModelLoadError(f"model {str(name)!r} is an adapter")
    found = list(folder.glob("*.safetensors"))
    if not found:
        raise ModelLoadError(f"model {str(name)!r} has no safetensors files")
    return found


logger = logging.getLogger(__name__)

# The models of a folder of chunk KV, by the fingerprints of their KV

FOLDER = "models"
LONGEST = 1 << 12


class Label(BaseModel, frozen=True, extra="forbid"):
    """The engine of a fingerprint. model: its public name, no path. dtype: of its weights."""

    model: str
    dtype: str
    lead_in: LeadInConfig


def put_label(store: Path, engine: Engine) -> None:
    """Record the label of an engine's fingerprint; failures are logged and ignored."""
    path = store / FOLDER / f"{engine.fingerprint}.json"
    label = Label(model=engine.model_name, dtype=engine.dtype or "", lead_in=engine.lead_in)
    try:
        if not path.exists():
            make_folder(path.parent)
            write_private(path, label.model_dump_json())
    except OSError as error:
        logger.info("no label was written in %s: %s", path.parent, error)


def labels_in(store: Path) -> dict[str, Label]:
    """Return the labels of a folder of chunk KV, by fingerprint; invalid files are skipped."""
    found = {}
    for path in sorted((store / FOLDER).glob("*.json")):
        try:
            with path.open() as file:
                found[path.stem] = Label.model_validate_json(file.read(LONGEST))
        except (OSError, ValueError, ConfigError):
            logger.info("%s is not a label: skipped", path)
    return found
