"""What this package uses of vLLM's sources is there in the installed release, and else told."""

from __future__ import annotations

import pytest

from tests.engines.vllm.source_contract import Sources, broken, installed, sources_at


@pytest.fixture(scope="module")
def release() -> Sources:
    return sources_at(installed())


def test_the_installed_release_has_all_names(release: Sources) -> None:
    assert broken(release) == []


@pytest.mark.parametrize(
    ("name", "other", "told"),
    [
        ("override_forward_context", "override", "vllm.forward_context.override_forward_context: "),
        ("skip_compiled", "skips", "set_forward_context: no parameter skip_compiled"),
        ("num_preemptions", "preempted", "Request: no member num_preemptions"),
        ("get_num_new_matched_tokens", "matched", "get_num_new_matched_tokens: no such hook"),
        ("num_external_tokens", "external", "update_state_after_alloc: takes other parameters"),
    ],
)
def test_what_a_release_calls_otherwise_is_told(
    release: Sources, name: str, other: str, told: str
) -> None:
    def read(file: str) -> str | None:
        text = release.read(file)
        return text and text.replace(name, other)

    assert any(told in line for line in broken(Sources(read)))
