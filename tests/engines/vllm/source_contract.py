"""Every name of vLLM that this package uses, held against what releases have.

`python -m tests.engines.vllm.source_contract PLACE` checks a release: PLACE is a wheel, an unpacked
folder, or a version such as ``0.33.0``, which is fetched by pip. Without PLACE, the installed vLLM
is checked. ``--record`` adds a version to releases.json, without one all that it has already, one
after another; a test checks this package against that file.

Of this package, ``ast`` reads what it imports of vLLM, calls, overrides, and reads of objects whose
class of vLLM's is known: by an annotation, or through another object.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import cacheblend_rag
from tests.engines.vllm.release_names import (
    Function,
    Record,
    Release,
    keep,
    recorded,
    sources_at,
)

PACKAGE = Path(cacheblend_rag.__file__).parent
NAMED = {
    "vllm_config": "vllm.config.VllmConfig",
    "model_config": "vllm.config.ModelConfig",
    "kv_cache_config": "vllm.v1.kv_cache_interface.KVCacheConfig",
}
"""What parameters of these names are, where no annotation says it."""
OUR_OWN = {
    *("scheduler", "worker"),  # of CacheBlendConnector
    *("record", "record_found", "_count", "_add"),  # of BlendStats
}
"""Methods of our subclasses of vLLM's classes that override nothing."""
OPTIONAL = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": "annotates",
    "CacheBlendConnector.get_transfer_results": "older releases are told the blocks that failed",
    "super().get_transfer_results": "called by vLLM, where it is there",
    "CacheBlendConnector.requires_kv_delivery": "older releases deliver to no one",
    "vllm.exceptions.VLLMClientError": "older releases raise ValueError",
}
"""What some releases do without, and why this package can."""
UNTYPED = '''
"""What this package does with objects of vLLM's that no annotation of its own names."""
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionBackend, AttentionLayer
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl, CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.flashinfer import FlashInferImpl, FlashInferMetadataBuilder
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionImpl, TritonAttentionMetadataBuilder,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request
def layers(layer: Attention, backend: AttentionBackend, scaled: AttentionLayer):
    layer.attn_backend, layer.attn_type, layer.impl, layer.kv_cache, layer.layer_name
    layer.kv_sharing_target_layer_name, layer.head_size, layer.head_size_v, layer.num_heads
    layer.num_kv_heads, layer.sliding_window, layer.query_quant
    scaled._k_scale, scaled._v_scale, scaled._q_scale
    backend.get_builder_cls()
def kernels(
    flash: FlashAttentionImpl, infer: FlashInferImpl, triton: TritonAttentionImpl,
    cpu: CPUAttentionBackendImpl,
):
    flash.scale, flash.sinks, flash.alibi_slopes, flash.logits_soft_cap
    infer.scale, infer.sinks, infer.alibi_slopes, infer.logits_soft_cap
    triton.scale, triton.sinks, triton.alibi_slopes, triton.logits_soft_cap
    cpu.scale, cpu.sinks, cpu.alibi_slopes, cpu.logits_soft_cap
    flash.do_kv_cache_update(layer, key, value, cache, slots)
    infer.do_kv_cache_update(layer, key, value, cache, slots)
    triton.do_kv_cache_update(layer, key, value, cache, slots)
    cpu.do_kv_cache_update(layer, key, value, cache, slots)
    flash.forward(layer, query, key, value, cache, metadata, output=output)
    infer.forward(layer, query, key, value, cache, metadata, output=output)
    triton.forward(layer, query, key, value, cache, metadata, output=output)
    cpu.forward(layer, query, key, value, cache, metadata, output=output)
def builders(
    flash: FlashAttentionMetadataBuilder, infer: FlashInferMetadataBuilder,
    triton: TritonAttentionMetadataBuilder, cpu: CPUAttentionMetadataBuilder,
):
    FlashAttentionMetadataBuilder(spec, names, vllm_config, device)
    FlashInferMetadataBuilder(spec, names, vllm_config, device)
    TritonAttentionMetadataBuilder(spec, names, vllm_config, device)
    CPUAttentionMetadataBuilder(spec, names, vllm_config, device)
    flash.build(0, common, fast_build=True)
    infer.build(0, common, fast_build=True)
    triton.build(0, common, fast_build=True)
    cpu.build(0, common, fast_build=True)
    infer._get_workspace_buffer()
    infer.set_workspace_buffer(buffer)
def groups(group: KVCacheGroupSpec, full: FullAttentionSpec, window: SlidingWindowSpec):
    group.layer_names, group.kv_cache_spec, full.block_size, window.sliding_window
    full.copy_with_new_block_size(size), window.copy_with_new_block_size(size)
def requests(
    request: Request, sent: EngineCoreRequest, client: AsyncMPClient, new: NewRequestData,
    cached: CachedRequestData, stats: PrefillStats,
):
    request.trace_headers, sent.trace_headers, new.req_id, new.num_computed_tokens
    cached.req_ids, cached.num_computed_tokens
    stats.num_prompt_tokens, stats.num_local_cached_tokens, stats.set(prompt, local, external)
    client.add_request_async(sent)
def options(llm: AsyncLLM):
    llm.engine_core, llm.model_config, llm.vllm_config
    llm.generate(prompt, sampling, name, data_parallel_rank=rank, trace_headers=headers)
    KVTransferConfig(
        kv_connector=name, kv_connector_module_path=path, kv_role=role,
        kv_load_failure_policy=policy, kv_connector_extra_config=settings,
    )
    AsyncEngineArgs(
        model=path, dtype=dtype, kv_transfer_config=transfer, structured_outputs_config=json,
        gpu_memory_utilization=share, kv_cache_memory_bytes=count, max_model_len=window,
        enforce_eager=eager, enable_prefix_caching=caching, disable_log_stats=quiet,
        kv_cache_dtype=kind, max_num_batched_tokens=most, tensor_parallel_size=ranks,
        data_parallel_size=replicas, enable_sleep_mode=sleeps, enable_cumem_allocator=own,
    )
'''


class Lack(NamedTuple):
    """What this package uses of vLLM that a release does not have."""

    where: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.why}"

    @property
    def is_optional(self) -> bool:
        """Whether this package can do without."""
        return self.what in OPTIONAL


@cache
def our_own() -> dict[str, ast.Module]:
    """Return this package's modules that may use vLLM, by their paths in it, and UNTYPED."""
    found = {"untyped": ast.parse(UNTYPED)}
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "from vllm" in text or any(name in text for name in NAMED):
            found[str(file.relative_to(PACKAGE))] = ast.parse(text)
    return found


def broken(release: Release) -> list[Lack]:
    """Return what this package uses of vLLM that a release does not have."""
    found: dict[Lack, None] = {}
    for name, tree in our_own().items():
        checked = _Checked(release, name)
        checked.visit(tree)
        found |= dict.fromkeys(checked.found)
    return list(found)


class _Checked(ast.NodeVisitor):
    """Finds in a module of ours what a release does not have.

    known: the full names of vLLM's that names, and other expressions, stand for here: what was
    imported, or the class of their value.
    """

    def __init__(self, release: Release, where: str) -> None:
        self.release, self.where = release, where
        self.found: list[Lack] = []
        self.known: dict[str, str] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] != "vllm":
            return
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if self.release.look(name) is None:
                self._lacks(name, "no such name")
            else:
                self.known[alias.asname or alias.name] = name

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self.known
        self.known = dict(outer)
        bases = [outer[text] for one in node.bases if (text := ast.unparse(one)) in outer]
        if bases:
            self._check_hooks(node, bases)
        for one in node.body:
            if isinstance(one, Function) and one.name == "__init__":
                self._note_parameters(one)
                self._note_values(one)
        kept = {text: name for text, name in self.known.items() if text.startswith("self.")}
        self.known = {**outer, **kept, **dict.fromkeys(["super()"] if bases else [], *bases[:1])}
        self.generic_visit(node)
        self.known = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.known
        self.known = dict(outer)
        for one in ast.walk(node):  # also those that are imported only here
            if isinstance(one, ast.ImportFrom):
                self.visit_ImportFrom(one)
        self._note_parameters(node)
        self._note_values(node)
        for one in ast.walk(node):  # what a function asks the class of is none of vLLM's
            if isinstance(one, ast.Call) and ast.unparse(one.func) == "isinstance":
                self.known.pop(ast.unparse(one.args[0]), None)
        self.generic_visit(node)
        self.known = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 (ast's own name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self._kind(node.value)
        if owner and self.release.look(f"{owner}.{node.attr}") is None:
            self._lacks(ast.unparse(node), "no such member")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._name(node.func)
        if ast.unparse(node.func) == "replace" and node.args:  # of dataclasses
            owner = self._kind(node.args[0])
            for one in node.keywords if owner else []:
                if one.arg and self.release.look(f"{owner}.{one.arg}") is None:
                    self._lacks(f"{ast.unparse(node.args[0])}.{one.arg}", "no such member")
        elif called and (takes := self.release.takes(called)) is not None:
            self._check_call(node, takes)
        self.generic_visit(node)

    def _check_call(self, node: ast.Call, takes: list[str]) -> None:
        """Note a call with parameters that there are not, or without those that there must be."""
        name = ast.unparse(node.func)
        names = [one.rstrip("=") for one in takes]
        given = {one.arg for one in node.keywords}
        for one in given - set(names) - {None}:
            self._lacks(f"{name}({one}=)", "no such parameter")
        is_spread = None in given or any(isinstance(one, ast.Starred) for one in node.args)
        if len(node.args) > len(names):
            self._lacks(f"{name}()", f"takes {len(names)} parameters")
        for one in [] if is_spread else takes[len(node.args) :]:
            if one not in given and not one.endswith("="):
                self._lacks(f"{name}()", f"needs {one}")

    def _check_hooks(self, made: ast.ClassDef, bases: list[str]) -> None:
        """Note the methods of our subclass that override none, or take less than theirs."""
        for method in (node for node in made.body if isinstance(node, Function)):
            if method.name.startswith("__") or method.name in OUR_OWN:
                continue
            name = f"{made.name}.{method.name}"
            places = [f"{base}.{method.name}" for base in bases]
            found = [place for place in places if self.release.look(place) is not None]
            if not found:
                self._lacks(name, "no such hook")
            mine = {one.arg for one in (*method.args.args, *method.args.kwonlyargs)}
            for takes in (self.release.takes(place) or [] for place in found):
                if not method.args.kwarg and not {one.rstrip("=") for one in takes} <= mine:
                    self._lacks(name, f"takes {', '.join(takes)}")

    def _note_parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Learn the classes of a function's parameters."""
        for one in (*function.args.args, *function.args.kwonlyargs):
            annotation = ast.unparse(one.annotation) if one.annotation else ""
            name = self.known.get(annotation) or NAMED.get(one.arg)
            self.known.pop(one.arg, None)
            if name:
                self.known[one.arg] = name

    def _note_values(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Learn the classes of what a function assigns, in order."""
        assigned = [
            one for one in ast.walk(function) if isinstance(one, ast.Assign | ast.AnnAssign)
        ]
        for node in sorted(assigned, key=lambda one: one.lineno):
            value = node.value
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=False))
                for to, one in pairs:
                    self._note(ast.unparse(to), one)

    def _note(self, text: str, value: ast.expr | None) -> None:
        self.known.pop(text, None)
        if value and (kind := self._kind(value)):
            self.known[text] = kind

    def _name(self, node: ast.expr) -> str | None:
        """Return vLLM's full name of what an expression names, or of its class."""
        if (name := self.known.get(ast.unparse(node))) is not None:
            return name
        if isinstance(node, ast.Attribute) and (owner := self._kind(node.value)):
            return f"{owner}.{node.attr}"
        return self._kind(node.func) if isinstance(node, ast.Call) else None

    def _kind(self, node: ast.expr) -> str | None:
        """Return the class of an expression's value, by its full name; None if not of vLLM's."""
        name = self._name(node)
        return (self.release.look(name) or None) if name else None

    def _lacks(self, what: str, why: str) -> None:
        self.found.append(Lack(self.where, what, why))


# Releases


def installed() -> Path:
    """Return the folder that the installed vLLM is in, without importing it."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed: name a wheel, a folder or a version")
    return Path(next(iter(spec.submodule_search_locations))).parent


def fetched(version: str, folder: Path) -> Path:
    """Have pip fetch a release's wheel for GPUs, which is hundreds of megabytes."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"vllm=={version}"], check=True, stdout=sys.stderr)
    return next(folder.iterdir())


def record(version: str | None) -> None:
    """Write what a release has under every name that this package asks for; None is all of them."""
    records = recorded()
    for each in [version] if version else [*records]:
        with tempfile.TemporaryDirectory() as folder:
            wheel = fetched(each, Path(folder))
            with wheel.open("rb") as opened:
                sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
            records[each] = Record(wheel.name, sha256, release=sources_at(wheel))
            broken(records[each])
    keep(dict(sorted(records.items(), key=lambda one: [*map(int, one[0].split("."))])))


def main() -> None:
    """Check a release and say what it lacks, or record what it has."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("place", nargs="?", help="a wheel, a folder or a version")
    parser.add_argument("--record", action="store_true", help="write it to releases.json")
    asked = parser.parse_args()
    place, is_version = asked.place, bool(re.fullmatch(r"\d[\w.]*", asked.place or ""))
    if asked.record:
        return record(place)
    with tempfile.TemporaryDirectory() as folder:
        if place is None:
            where = installed()
        elif Path(place).exists():
            where = Path(place)
        elif is_version:
            where = fetched(place, Path(folder))
        else:
            raise SystemExit(f"{place}: no such file or folder, and no version")
        lacks = broken(sources_at(where))
    for lack in lacks:
        print(f"{lack}{' (' + OPTIONAL[lack.what] + ')' if lack.is_optional else ''}")
    if all(lack.is_optional for lack in lacks):
        print(f"{where.name}: has every name that cacheblend-rag cannot do without")
    else:
        sys.exit(1)


if __name__ == "__main__":
    main()
