"""What is told of a model's chat template, and of a server's namespace."""

from __future__ import annotations

import copy

import pytest

from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.observe.environment import namespace_name, role_markers
from cacheblend_rag.text.encoder import PromptEncoder
from tests.tokenizer_kinds import KINDS, tokenizer_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_of_special_tokens_is_told(kind: str) -> None:
    assert role_markers(PromptEncoder(tokenizer_of(kind))) == "special tokens"


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    ("template", "markers"),
    [
        ("{% for m in messages %}[INST] {{ m.content }} [/INST]</s>{% endfor %}", "text"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "none"),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_roles_told_apart_by_text_are_told(
    template: str | None, markers: str | None, ends: bool
) -> None:
    """Also by a tokenizer that has no BOS, as Qwen's."""
    tokenizer = copy.deepcopy(tokenizer_of("tiktoken"))
    tokenizer.chat_template = template
    if not ends:
        tokenizer.bos_token = None
    assert role_markers(PromptEncoder(tokenizer)) == markers


def test_a_servers_namespace_is_shown_by_its_name_to_who_knows_it() -> None:
    told = namespace_id("acme")
    assert namespace_name(told, "acme") == "acme"
    assert namespace_name(told, "default") == f"not 'default' but another, {told}"
    assert namespace_name("", "default") == ""  # of a server that does not blend
