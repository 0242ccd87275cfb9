"""The keys under which LangChain caches answers, as a cache is asked for them."""

from __future__ import annotations

from typing import Any

from langchain_core import caches
from langchain_core.globals import get_llm_cache, set_llm_cache
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration

from langchain_cacheblend import ChatCacheBlend


class KnowingCache(caches.BaseCache):
    """A cache that knows each answer. keys: what it was asked for, without the prompts."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def lookup(self, prompt: str, llm_string: str) -> caches.RETURN_VAL_TYPE:
        self.keys.append(llm_string)
        return [ChatGeneration(message=AIMessage("known"))]

    def update(self, prompt: str, llm_string: str, return_val: caches.RETURN_VAL_TYPE) -> None:
        raise AssertionError("a known answer is not computed")

    def clear(self, **kwargs: Any) -> None:
        self.keys.clear()


def cache_key(llm: ChatCacheBlend, **options: Any) -> str:
    """The key of an answer with these options; nothing is loaded for it."""
    cache, before = KnowingCache(), get_llm_cache()
    set_llm_cache(cache)
    try:
        assert llm.invoke("hello", **options).text == "known"
    finally:
        set_llm_cache(before)
    (key,) = cache.keys
    return key
