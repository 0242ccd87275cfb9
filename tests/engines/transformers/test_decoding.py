"""Text that comes piece by piece is the text that comes whole, cut at the first stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.engines.sampling import LONGEST_STOP, SamplingParams
from cacheblend_rag.engines.transformers.decoding import TextStream
from cacheblend_rag.errors import ConfigError


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with few merges, so that most characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat. the end."], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_level()


def stream(text: str, stop: tuple[str, ...]) -> tuple[list[str], TextStream]:
    out = TextStream(TOKENIZER, stop)
    pieces = []
    for token in TOKENIZER(text)["input_ids"]:
        pieces.append(out.feed(token))
        if out.stopped:
            break
    return [*pieces, out.finish()], out


@given(st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_pieces_join_to_the_text(text: str) -> None:
    pieces, out = stream(text, ())
    assert "".join(pieces) == out.text == text


@given(
    st.text(alphabet="abé🙂 ", max_size=30),
    st.lists(st.text(alphabet="abé🙂 ", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, out = stream(text, tuple(stop))
    found = [text.index(s) for s in stop if s in text]
    assert out.stopped == bool(found)
    if not found:
        assert "".join(pieces) == text
        return
    assert "".join(pieces) == out.text
    assert not any(s in out.text for s in stop)
    assert text.startswith(out.text)


def test_no_piece_holds_half_a_character_or_half_a_stop_string() -> None:
    pieces, _ = stream("né🙂 STOP more", ("STOP",))
    assert "".join(pieces) == "né🙂 "
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


class Counted(str):
    """Counts how often a stop string is looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        Counted.looks += 1
        return super().__getitem__(key)

    def startswith(self, *given: Any) -> bool:
        Counted.looks += 1
        return super().startswith(*given)


def test_a_long_stop_string_costs_a_look_or_two_a_token() -> None:
    text = "aab" * 300
    Counted.looks = 0
    pieces, out = stream(text, (Counted("a" * LONGEST_STOP), Counted(text + "c")))
    assert "".join(pieces) == text
    assert not out.stopped
    assert Counted.looks <= 6 * len(text)
    with pytest.raises(ConfigError, match="at most 4096 characters"):
        SamplingParams(stop=("a" * (LONGEST_STOP + 1),))
