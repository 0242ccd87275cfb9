"""What this package uses of vLLM's sources is there in every release, and else told."""

from __future__ import annotations

import tomllib

import pytest

from cacheblend_rag.engines.vllm.versions import OLDEST
from tests.engines.vllm.release_names import Record, Sources, recorded, sources_at
from tests.engines.vllm.source_contract import OPTIONAL, broken, installed
from tests.readme import ROOT

RECORDED = recorded()


@pytest.fixture(scope="module")
def release() -> Sources:
    return sources_at(installed())


def test_the_installed_release_has_all_names(release: Sources) -> None:
    assert broken(release) == []


@pytest.mark.parametrize("version", RECORDED)
def test_every_release_has_all_names_that_cannot_be_done_without(version: str) -> None:
    assert [lack for lack in broken(RECORDED[version]) if not lack.is_optional] == []


def test_what_is_optional_is_missing_in_the_oldest_release_and_in_no_new_one() -> None:
    oldest, *_, newest = RECORDED.values()
    assert {lack.what for lack in broken(oldest)} == set(OPTIONAL)
    assert broken(newest) == []


def test_every_release_that_can_be_installed_is_recorded_and_in_the_table() -> None:
    releases = [tuple(map(int, version.split(".")[:2])) for version in RECORDED]
    first, last = OLDEST[1], releases[-1][1]
    assert releases == [(0, minor) for minor in range(first, last + 1)]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["vllm"] == [f"vllm>=0.{first},<0.{last + 1}"]
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert [version for version in RECORDED if f"\n| {version} | " not in page] == []


def test_a_name_that_was_never_asked_for_is_no_answer() -> None:
    with pytest.raises(LookupError, match=r"vllm\.LLM is in no record: run .* --record"):
        Record("", "").look("vllm.LLM")


@pytest.mark.parametrize(
    ("name", "other", "told"),
    [
        ("override_forward_context", "override", "override_forward_context: no such name"),
        ("skip_compiled", "skips", "set_forward_context(skip_compiled=): no such parameter"),
        ("num_preemptions", "preempted", "request.num_preemptions: no such member"),
        ("get_num_new_matched_tokens", "matched", "get_num_new_matched_tokens: no such hook"),
        ("num_external_tokens", "external", "update_state_after_alloc: takes request, blocks, ext"),
        ("prefill_context_parallel_size", "pcp", "parallel.prefill_context_parallel_size: no such"),
        ("WAITING_FOR_REMOTE_KVS", "WAITING", "RequestStatus.WAITING_FOR_REMOTE_KVS: no such"),
        ("slot_mapping: torch.Tensor,", "slots: torch.Tensor, more: int,", "update(): needs more"),
        ("num_local_cached_tokens", "local", "stats.num_local_cached_tokens: no such member"),
        ("all_moe_layers", "all_experts", "context.all_moe_layers: no such member"),
    ],
)
def test_what_a_release_calls_otherwise_is_told(
    release: Sources, name: str, other: str, told: str
) -> None:
    def read(file: str) -> str | None:
        text = release.read(file)
        return text and text.replace(name, other)

    assert any(told in str(lack) for lack in broken(Sources(read)))
