"""Which passages begin with other tokens behind a space, and that their form there is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.errors import PromptError
from cacheblend_rag.text import behind_space as module
from cacheblend_rag.text.behind_space import HEAD, behind_space
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.prompt import BlendPrompt
from tests.tokenizer_kinds import KINDS, tokenizer_of
from tests.toy import TOY

REST = " was born in a town by the sea, and lived there for forty years (or more)."
OTHERS = {"smollm2": ["raymond", "merrill", "snyder", "birmingham"], TOY: ["rene wenzel"]}
ALIKE = ["Raymond", "the", "1984:", "(raymond", "\nraymond", " raymond", "Zoë"]


@pytest.fixture(scope="module", params=OTHERS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "smollm2":
        request.getfixturevalue("smollm2_folder")
    return str(request.param)


@pytest.fixture(scope="module")
def encoder(name: str) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(name))


def holds(tokens: Sequence[int], part: Sequence[int]) -> bool:
    starts = range(len(tokens) - len(part) + 1)
    return any(tuple(tokens[at : at + len(part)]) == tuple(part) for at in starts)


def tokens_of(encoder: PromptEncoder, prompt: str) -> tuple[int, ...]:
    return BlendPrompt.of(prompt).encode(encoder).token_ids


def test_a_rare_name_has_another_form_behind_a_space(name: str, encoder: PromptEncoder) -> None:
    for first in OTHERS[name]:
        text = first + REST
        form = behind_space(text, encoder)
        assert form == f" {text}"
        for before in ("- ", "[1] ", "Content: ", "as we know"):
            prompt = tokens_of(encoder, before + form[before[-1] == " " :] + "\n")
            assert holds(prompt, encoder.chunk(form))
            assert not holds(prompt, encoder.chunk(text))
        assert holds(tokens_of(encoder, f"\n\n{text}\n"), encoder.chunk(text))
        assert behind_space(form, encoder) is None, "the form has no form of its own"


def test_other_texts_have_none(encoder: PromptEncoder) -> None:
    for first in ALIKE:
        assert behind_space(first + REST, encoder) is None
    assert behind_space("", encoder) is None
    assert behind_space(" ", encoder) is None


def test_only_the_beginning_counts(name: str, encoder: PromptEncoder) -> None:
    first, *_ = OTHERS[name]
    assert behind_space(first + REST * 400, encoder) == f" {first}{REST * 400}"
    assert behind_space("The " + "x" * HEAD + first + REST, encoder) is None


@pytest.mark.parametrize("splits", [True, False])
def test_text_like_a_special_token_changes_nothing(
    name: str, encoder: PromptEncoder, splits: bool
) -> None:
    """The tokens that are compared are those that chunks have, of whatever length they are."""
    encoder = PromptEncoder(encoder.tokenizer, split_special_tokens=splits)
    for marker in ("</s>", "<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        for words in range(12):
            rest = f" lived{' here' * words} {marker}{REST * 2}"
            assert behind_space(f"She{rest}", encoder) is None
            for first in OTHERS[name]:
                assert behind_space(first + rest, encoder) == f" {first}{rest}"


def test_a_form_with_too_many_others_would_not_be_known_as_one(
    name: str, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OTHER", 2)
    for first in OTHERS[name]:
        assert behind_space(first + REST, encoder) is None


def test_what_no_tokenizer_encodes_is_refused_as_elsewhere(encoder: PromptEncoder) -> None:
    with pytest.raises(PromptError, match="unpaired surrogate"):
        behind_space("raymond \ud800", encoder)


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_tokenizer_loses_more_than_two_tokens(kind: str) -> None:
    """A tokenizer that drops the space has the same tokens there, so there is no other form."""
    encoder = PromptEncoder(tokenizer_of(kind))
    for first in ("The lighthouse", "harbour", "kept", "zyxwvut", "widow's"):
        text = f"{first} at Vell was built in 1821."
        form = behind_space(text, encoder)
        spaced, own = encoder.chunk(f" {text}"), encoder.chunk(text)
        assert (form is None) == holds(own, spaced[2:])
        if kind in ("stripping", "wordpiece", "word level"):
            assert form is None
