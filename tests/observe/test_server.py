from __future__ import annotations

from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.observe.diagnosis import namespace_name


def test_a_servers_namespace_is_shown_by_its_name_to_who_knows_it():
    told = namespace_id("acme")
    assert namespace_name(told, "acme") == "acme"
    assert namespace_name(told, "default") == f"not 'default' but another, {told}"
    assert namespace_name("", "default") == ""  # of a server that does not blend
