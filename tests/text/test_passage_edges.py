"""Passages are found in the tokens of chat prompts, but for very few at their edges."""

from __future__ import annotations

import pytest

from cacheblend_rag.engines.model_files import load_tokenizer
from tests.passage_edges import FORMS, JOINS, PassageIndex, texts_of
from tests.tokenizer_kinds import KINDS, tokenizer_of
from tests.toy import TOY

FEWEST = {512: 0.995, 100: 0.97}
PASSAGES = {512: 12, 100: 40}


@pytest.fixture(scope="module", params=[(TOY, 512), ("smollm2", 100)], ids=str)
def index(request: pytest.FixtureRequest) -> PassageIndex:
    name, tokens = request.param
    if name == "smollm2":
        request.getfixturevalue("smollm2_folder")
    return PassageIndex(load_tokenizer(name), texts_of(), tokens, PASSAGES[tokens])


@pytest.mark.parametrize("join", JOINS)
def test_hardly_any_tokens_are_lost_at_the_edges(index: PassageIndex, join: str) -> None:
    tokens = max(size for size in FEWEST if len(index.passages) == PASSAGES[size])
    edges = index.edges(join)
    assert len(edges.lost) == 2 * PASSAGES[tokens]
    assert edges.found >= FEWEST[tokens]
    assert max(edges.lost) <= (3 if join == "nothing" else 2)
    if join in ("blank lines", "lines", "tags on lines"):
        assert edges.found == 1


def test_escaped_text_is_found_as_a_whole_only_if_its_escaped_form_is_indexed() -> None:
    texts = [f'"{text}"\nÉtude No. 1' for text in texts_of()[:40]]
    plain = PassageIndex(load_tokenizer(TOY), texts, 100, 24, FORMS[:1])
    both = PassageIndex(load_tokenizer(TOY), texts, 100, 24, FORMS)
    for join in ("JSON", "JSON, UTF-8"):
        assert plain.edges(join).found < 0.97 <= both.edges(join).found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word level"])
def test_every_kind_of_tokenizer_keeps_them(kind: str) -> None:
    """Tokens of whole words are left out: nearly all of the text is its one unknown token."""
    index = PassageIndex(tokenizer_of(kind), texts_of()[:20], 200, 12)
    for join in ("blank lines", "spaces", "tags"):
        edges = index.edges(join)
        assert edges.found >= 0.995
        assert max(edges.lost) <= (4 if kind == "unigram" else 1), "words it encodes as a whole"
