"""The contract with vLLM's sources: the installed release keeps it, and it misses nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import cacheblend_rag
from cacheblend_rag import SamplingParams
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.serve import SERVER
from tests.engines.vllm.release_sources import (
    Name,
    Sources,
    broken,
    installed,
    parameters,
    sources_at,
)
from tests.engines.vllm.source_contract import CONTRACT

Function = ast.FunctionDef | ast.AsyncFunctionDef

PACKAGE = Path(cacheblend_rag.__file__).parent
OWN = {
    "CacheBlendConnector": {"scheduler", "worker"},
    "BlendStats": {"__init__", "record", "record_found", "_count", "_add"},
    "BlendPromMetrics": set(),
    "StepResults": set(),
    "StepJobs": set(),
}
"""Methods of our subclasses of vLLM's classes that are no hooks of vLLM's."""
NAMED = {
    "vllm_config": CONTRACT["vllm.config"]["VllmConfig"],
    "model_config": CONTRACT["vllm.config"]["ModelConfig"],
    "kv_cache_config": CONTRACT["vllm.v1.kv_cache_interface"]["KVCacheConfig"],
}
"""What parameters of these names are, where vLLM's class is not imported for an annotation."""


@pytest.fixture(scope="module")
def release() -> Sources:
    return sources_at(installed())


@cache
def ours() -> list[tuple[Path, ast.Module]]:
    trees = ((file, ast.parse(file.read_text())) for file in sorted(PACKAGE.rglob("*.py")))
    return [(file, tree) for file, tree in trees if any(imported(tree))]


def said(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


def imported(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """What a module imports of vLLM: module, name there, name here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", a.name, a.asname or a.name) for a in node.names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "vllm" for alias in node.names)


def test_the_installed_release_keeps_it(release: Sources) -> None:
    assert broken(release, CONTRACT) == []


def test_every_import_of_vllm_is_in_it() -> None:
    found = {(module, name) for _, tree in ours() for module, name, _ in imported(tree)}
    assert len(found) > 30
    assert {(m, n) for m, n in found if n not in CONTRACT.get(m, {})} == set()
    assert SERVER in CONTRACT


def test_what_older_releases_lack_is_imported_where_it_is() -> None:
    """For annotations only, or in a ``try``."""
    may_lack = {
        (m, n) for m, names in CONTRACT.items() for n, one in names.items() if "" in one.since
    }
    for file, tree in ours():
        guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Try)]
        safe = [pair for node in guarded for pair in imported(node)]
        bare = [pair for pair in imported(tree) if pair not in safe]
        assert not may_lack & {(module, name) for module, name, _ in bare}, file


def test_every_argument_by_name_is_in_it(release: Sources) -> None:
    """Of calls of what is imported from vLLM, and of ``replace`` of a ForwardContext."""
    seen = 0
    for file, tree in ours():
        known = {here: entry(release, module, name) for module, name, here in imported(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                for keyword in node.keywords if node.func.id in known else ():
                    if keyword.arg is not None:
                        seen += 1
                        assert keyword.arg in known[node.func.id].parameters, (file, keyword.arg)
    assert seen > 12


def entry(release: Sources, module: str, name: str) -> Name:
    """What the contract says of a name, where it stands itself rather than is imported."""
    stated = CONTRACT[module][name]
    there = release.find(module, name)
    assert there is not None
    return CONTRACT.get(there[0], {}).get(name, stated)


def test_what_is_read_of_vllms_objects_is_in_it(release: Sources) -> None:
    """Of parameters that are vLLM's by annotation or name: ``request.cache_salt``, say."""
    seen = 0
    for file in sorted((PACKAGE / "engines/vllm").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        known = {here: entry(release, module, name) for module, name, here in imported(tree)}
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            kinds = {
                given.arg: kind
                for given in (*function.args.args, *function.args.kwonlyargs)
                if (kind := known.get(said(given.annotation)) or NAMED.get(given.arg))
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Assert):  # that it is a class of ours
                    kinds = {
                        n: k for n, k in kinds.items() if f"isinstance({n}, " not in said(node)
                    }
            for node in ast.walk(function):
                here = said(node.value) if isinstance(node, ast.Attribute) else ""
                if isinstance(node, ast.Attribute) and here in kinds:
                    seen += 1
                    assert node.attr in kinds[here].members, (file, here, node.attr)
    assert seen > 40


def test_every_hook_of_ours_is_one_of_vllms(release: Sources) -> None:
    """Each method of our subclasses overrides one that there is, and takes what that takes."""
    seen = set()
    for _, tree in ours():
        bases = {here: (module, name) for module, name, here in imported(tree)}
        for made in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            named = [each.id for each in made.bases if isinstance(each, ast.Name)]
            if theirs := [bases[base] for base in named if base in bases]:
                seen.add(made.name)
                check_hooks(release, made, theirs)
    assert seen == set(OWN)


def check_hooks(release: Sources, made: ast.ClassDef, bases: Sequence[tuple[str, str]]) -> None:
    known: dict[str, ast.AST] = {}
    told = set[str]()
    for module, base in bases:
        there = release.find(module, base)
        assert there is not None
        assert isinstance(there[1], ast.ClassDef)
        known |= release.members(there[0], there[1])
        told |= set(CONTRACT[module][base].members)
    for method in (node for node in made.body if isinstance(node, Function)):
        if method.name in OWN[made.name]:
            continue
        assert method.name in told, method.name
        theirs = known[method.name]
        assert isinstance(theirs, Function)
        mine, takes_any = parameters(method)
        assert takes_any or set(parameters(theirs)[0]) <= set(mine), method.name


def test_what_it_is_told_by_dictionary_is_in_it() -> None:
    told = CONTRACT["vllm.config"]["KVTransferConfig"].parameters
    assert set(ConnectorSettings().to_transfer_config()) == set(told)
    sampled = set(CONTRACT["vllm.sampling_params"]["SamplingParams"].parameters)
    assert set(SamplingParams.model_fields) <= sampled
