"""``cacheblend-rag doctor``: checks versions, devices, models, stores, servers and requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.cli.doctor_request import diagnose_request
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.models import DEFAULT_MODEL, LOCAL_MODELS
from cacheblend_rag.observe import diagnosis
from cacheblend_rag.settings import check_namespace
from cacheblend_rag.settings.options import check_server_url

OF_COLLECTIONS = ("model", "kv_path", "instruction", "lead_in")


def doctor_command(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{LOCAL_MODELS}.",
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server's URL: check that instead. CACHEBLEND_API_KEY is its key."),
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run the prompt in this file, and say what is wrong."),
    ] = None,
    collection: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The same with --question to a collection of `index`."),
    ] = None,
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="With --collection: the question.")
    ] = None,
    top_k: asking.TopKOption = asking.TOP_K,
    runs: Annotated[int, typer.Option(min=1, help="How often a request is timed each way.")] = 3,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the answer over which predictions are compared.")
    ] = 16,
    verify: Annotated[
        bool, typer.Option("--verify", help="With a request: run `verify` on its model, too.")
    ] = False,
    ratio: asking.RatioOption = None,
    selector: asking.SelectorOption = None,
    check_layers: Annotated[
        str | None, typer.Option(metavar="LAYER,...", help="Where hkvd compares KV.")
    ] = None,
    profile: options.ProfileOption = None,
    instruction: Annotated[
        str | None,
        typer.Option(help="With --prompt: the text that chunks were computed after."),
    ] = None,
    lead_in: Annotated[
        str | None, typer.Option(help="With --prompt: none, bos, instruction or document.")
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="With --url or --prompt: the namespace of chunks and server.")
    ] = "default",
    kv_path: Annotated[
        Path | None,
        typer.Option(
            envvar=options.KV_PATH_VARIABLE,
            help="A folder of chunk KV to check; with --prompt, the one that is read.",
        ),
    ] = None,
    store: options.StoreOption = None,
    device: options.DeviceOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check versions, devices, the model and a store, or a server; exit code 1 if it cannot blend.

    With --url, --model names the tokenizer that must be the server's. With --prompt or
    --collection, a request is run, and what is wrong with it named; exit code 1 if there is a
    fault.
    """
    if url is not None:
        check_server_url(url)
    check_namespace(namespace)
    if prompt is not None or collection is not None or question is not None:
        if collection is not None and prompt is None and question is not None:
            options.refuse(context, OF_COLLECTIONS, "a collection has its own, leave it out")
        diagnose_request(
            prompt,
            collection,
            question,
            model=model,
            url=url,
            namespace=namespace,
            kv_path=kv_path,
            store=store,
            instruction=instruction,
            lead_in=lead_in,
            ratio=ratio,
            selector=selector,
            check_layers=check_layers,
            profile=profile,
            device=device,
            top_k=top_k,
            runs=runs,
            answer_tokens=answer_tokens,
            verify=verify,
            as_json=as_json,
        )
        return
    if url is not None:
        _check_url(url, model, namespace, as_json=as_json)
        return
    with output.stdout_reserved(as_json):
        found: dict[str, Any] = {
            "versions": diagnosis.examine_versions(),
            "devices": diagnosis.examine_devices(),
            "model": _model(model or DEFAULT_MODEL, device),
            "extras": diagnosis.examine_extras(),
            "store": None if kv_path is None else _store(kv_path),
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
        found = _finding({"url": url}, lambda: diagnosis.examine_server(url, model, namespace))
    if as_json:
        output.print_json(found)
    else:
        _print_server(found)
    if found["problem"]:
        raise typer.Exit(1)


def _model(name: str, device: str | None) -> dict[str, Any]:
    return _finding(
        {"model": name}, lambda: diagnosis.examine_model(options.local_model(name), device)
    )


def _store(path: Path) -> dict[str, Any]:
    from cacheblend_rag.admin.inspect import examine_store

    return _finding({"path": str(path)}, lambda: examine_store(options.store_folder(path)))


def _finding(of: dict[str, Any], examine: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return findings; if the examination fails, its error is the finding's problem."""
    try:
        return examine()
    except CacheBlendError as error:
        return {**of, "problem": str(error)}


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


def _tokenizer_line(tokenizer: Mapping[str, Any]) -> str:
    """Return whether a space is put before texts, and whether a passage can imitate a role."""
    prefix = "puts a space before texts" if tokenizer["adds_prefix_space"] else "adds no space"
    markers = {
        None: "no chat template",
        "none": "the chat template marks no roles",
        "special tokens": "the chat template's roles are special tokens, never part of passages",
        "text": "the chat template's roles are plain text, so a passage can imitate them",
    }[tokenizer["role_markers"]]
    return f"{prefix}; {markers}"


def _store_line(store: Mapping[str, Any]) -> str:
    if store["problem"]:
        return str(store["problem"])
    size = f"{store['entries']:,} chunks, {store['bytes'] / 2**20:,.1f} MiB"
    return f"{size}, {len(store['damaged'])} damaged"


def _print_server(found: Mapping[str, Any]) -> None:
    if "model" not in found:
        typer.echo(f"not usable: {output.printable(found['problem'])}")
        return
    store, connector = found["store"], found["connector"]
    facts: dict[str, Any] = {"server": found["url"]}
    facts |= {"model": f"{found['model']}, context window {found['context_window']:,}"}
    facts |= {name: value or "not told" for name, value in found["versions"].items()}
    facts["blending"] = "active" if found["blending"] else "not active"
    if found["blending"]:
        facts["store"] = f"{store['chunks']:,} chunks, {store['bytes'] / 2**20:,.1f} MiB"
        facts |= connector
    if found["problem"]:
        facts["problem"] = found["problem"]
    output.print_facts("usable" if found["problem"] is None else "not usable", facts)
