"""Hints travel within their own scope only."""

from __future__ import annotations

from cacheblend_rag import Chunk
from langchain_core.runnables import RunnableLambda, RunnableParallel

from langchain_cacheblend import retrieval_hints
from langchain_cacheblend.hints import current_hints, publish


def test_nothing_is_kept_without_a_scope() -> None:
    publish([Chunk("x")])
    assert current_hints() == ()


def test_a_scope_ends_with_its_block() -> None:
    with retrieval_hints():
        publish([Chunk("x")])
        assert current_hints() == (Chunk("x"),)
    assert current_hints() == ()


def test_steps_of_a_chain_share_the_scope_around_it() -> None:
    retrieve = RunnableLambda(lambda text: publish([Chunk(text)]))
    chain = RunnableParallel(a=retrieve, b=retrieve) | (lambda _: current_hints())
    with retrieval_hints():
        assert chain.invoke("x") == (Chunk("x"), Chunk("x"))
