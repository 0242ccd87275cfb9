"""Boundaries: a chunk's KV knows nothing of what its reader may not see, however it is indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from cacheblend_rag import BlendConfig, Chunk, ChunkKV, Document, TieredKVStore, TransformersEngine
from tests.toy import INSTRUCTION, TOY, generate_prompts
from tests.toy.questions import toy_documents

HEAD = f"{INSTRUCTION}\n\n"
REUSE = BlendConfig(recompute_ratio=0.0, min_tokens=0)
PROMPTS = generate_prompts("fragments", 8, 7)
"""Questions by name, over chunks that say "her" and "his": the chunks that name are left out."""

IndexWay = Callable[[TransformersEngine, Document], object]


def whole(engine: TransformersEngine, document: Document) -> object:
    return engine.precompute([document], progress=False)


def in_parts(engine: TransformersEngine, document: Document) -> object:
    """As ``index`` does."""
    for chunk in document.to_chunks():
        engine.precompute([chunk], progress=False)
    return whole(engine, document)


def known_before(engine: TransformersEngine, document: Document) -> object:
    """As an index to which boundaries are given later."""
    whole(engine, replace(document, boundaries=()))
    return whole(engine, document)


WAYS: list[IndexWay] = [whole, in_parts, known_before]


@pytest.fixture(scope="module")
def demo() -> Iterator[TransformersEngine]:
    with closing(TransformersEngine(TOY, config=REUSE, instruction=HEAD)) as engine:
        yield engine


def fresh(demo: TransformersEngine, lead_in: str = "document") -> TransformersEngine:
    """An engine that has stored nothing, around the same model."""
    return TransformersEngine(
        demo.model,
        tokenizer=demo.tokenizer,
        store=TieredKVStore.open(host_bytes=None),
        config=REUSE,
        instruction=HEAD,
        lead_in=lead_in,
    )


def bounded(document: Document) -> Document:
    """The document, whose first chunk is for others than the rest of it."""
    hidden = ("staff", *["all"] * (len(document.chunks) - 1))
    return replace(document, boundaries=hidden)


def stored(engine: TransformersEngine, chunk: Chunk) -> ChunkKV:
    found = engine.store.get(engine.key(chunk)).kv
    assert found is not None
    return found


def document_of_three() -> Document:
    documents = (d for p in PROMPTS for d in toy_documents(p.documents))
    return next(document for document in documents if len(document.chunks) == 3)


@pytest.mark.parametrize(
    ("way", "lead_in"), [*((way, "document") for way in WAYS), (in_parts, "instruction")]
)
def test_kv_and_prior_are_those_without_the_hidden_passage(
    demo: TransformersEngine, way: IndexWay, lead_in: str
) -> None:
    document = document_of_three()
    _, *seen = bounded(document).to_chunks()
    alone = Document(document.document_id, document.chunks[1:], document.separator)
    engine, other = fresh(demo, lead_in), fresh(demo, lead_in)
    way(engine, bounded(document))
    if way is in_parts:
        way(other, alone)
    else:
        other.precompute([document.chunks[0], alone], progress=False)
    assert alone.to_chunks() == seen
    for chunk in seen:
        here, there = stored(engine, chunk), stored(other, chunk)
        assert torch.equal(here.keys, there.keys)
        assert torch.equal(here.values, there.values)
        assert here.position == there.position
        assert (here.prior is None) == (there.prior is None)
        assert here.prior is None or (there.prior is not None and here.prior.equal(there.prior))
        assert lead_in == "instruction" or engine.key(chunk) == other.key(chunk)
    open_ended = fresh(demo, lead_in)
    whole(open_ended, document)
    for chunk in document.to_chunks()[1:]:
        prior = stored(open_ended, chunk).prior
        assert prior is not None
        assert not any(
            found is not None and prior.equal(found)
            for found in [stored(engine, one).prior for one in seen]
        )


def test_a_boundary_that_is_given_later_leaves_no_older_kv(demo: TransformersEngine) -> None:
    engine, document = fresh(demo), document_of_three()
    known_before(engine, bounded(document))
    wanted = {engine.key(chunk) for chunk in bounded(document).to_chunks()}
    assert set(engine.store.keys()) == wanted
    assert not wanted & {engine.key(chunk) for chunk in document.to_chunks()[1:]}
