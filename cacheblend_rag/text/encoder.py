"""Encodes a prompt's segments as one text, and finds the tokens of its chunks.

The model reads the tokens that it was trained on, those of ``tokenizer(text)``. A chunk's stored KV
belongs to the tokens of the chunk by itself; in the prompt they occur as a run, except for a few at
the edges that the tokenizer joins with the text beside them (see ``runs``).

A chunk is untrusted data: text in it that looks like a special token is encoded as plain text, by
splitting the text inside of it. Hugging Face's ``split_special_tokens`` is not used: it is a switch
in the tokenizer, hence seen by other threads, and it ignores added tokens that are not declared
special although templates use them as such.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from cacheblend_rag.errors import PromptError
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.known_texts import (
    CUT,
    SHORTEST,
    KnownText,
    KnownTexts,
    find_inside,
    has_cuts,
)
from cacheblend_rag.text.special_tokens import Markers, special_tokens

if TYPE_CHECKING:
    from cacheblend_rag.text.runs import Ids

TokenIds = tuple[int, ...]

EDGE_TOKENS = 4
"""Most tokens by which encoding a text together with its neighbours changes its length."""

PROBE = "a"
WORD = "A"
"""A placeholder for the passage that follows an instruction or a separator."""
UNKNOWN = "\u16a0 \U00012000 \ue123"
"""Characters that hardly a vocabulary holds: a rune, cuneiform, and one of private use."""
ANCHORS = ("\n", ".", "0", "a", "(", "\x01")
"""Texts are encoded after one of these, whose tokens are then removed."""
SAMPLES = (
    ("Context: ", "Alpha one."),
    ("Alpha one.", " Beta two?"),
    ("Beta two?", "\n\nWhy 42"),
    ("Why 42\n", "and so on"),
    ("Context:\n(", "alpha"),
    ("alpha", ") and so"),
    ("half", "way"),
    ("19", "84 or so"),
)
"""Pairs of texts that show whether a tokenizer puts a space before a text."""
KNOWN_TEXTS_BYTES = 64 << 20
"""Memory for the tokens of known texts: about 12,000 chunks of 512 tokens."""


Tokenizer: TypeAlias = Any
"""A Hugging Face tokenizer."""


Piece = tuple[str, bool]
"""A text, and whether what looks like a special token in it is split, and so text."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a prompt.

    Args:
        text: its characters.
        chunk: the chunk with this text, None for other text (instructions, separators, question).
        is_data: whether text that is no chunk is data as well, such as a tool's result: what looks
            like a special token in it is text.
    """

    text: str
    chunk: Chunk | None = None
    is_data: bool = False

    @property
    def is_untrusted(self) -> bool:
        """Whether what looks like a special token in it is text: in chunks and other data."""
        return self.is_data or self.chunk is not None


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Tokens [start, end) of an encoded prompt are tokens of ``chunk``.

    before, after: the chunk's tokens that are missing at its edges, because the tokenizer joins its
    text with the text beside it.
    """

    chunk: Chunk
    start: int
    end: int
    before: TokenIds = ()
    after: TokenIds = ()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids and the spans of its chunks, in order.

    A chunk without tokens (its characters are normalized away) has no span.

    inseparable: chunks with hardly any of their own tokens in the prompt, because the tokenizer
    joins them with the text beside them.
    """

    token_ids: TokenIds
    spans: tuple[ChunkSpan, ...] = ()
    inseparable: tuple[Chunk, ...] = ()


class PromptEncoder:
    """Encodes prompts with one tokenizer. May be used by several threads at once.

    It keeps the tokens of texts, and encodes only what is new and the seams (see ``known_texts``).
    The tokenizer must not be changed meanwhile. Each tenant has an engine, and so an encoder.

    known_bytes: memory for known texts.
    """

    def __init__(self, tokenizer: Tokenizer, *, known_bytes: int = KNOWN_TEXTS_BYTES) -> None:
        self.tokenizer = tokenizer
        self.opening = opening_tokens(tokenizer)
        self._special = special_tokens(tokenizer)
        # What characters become that the tokenizer does not know (<unk>, say) steers nothing.
        self.special_ids = frozenset(self._special).difference(self._plain(UNKNOWN))
        self._markers = Markers(self._special.values())
        self._anchors: tuple[tuple[str, TokenIds], ...] = ()
        self._find_anchors()
        self._known_texts = KnownTexts(known_bytes)

    def chunk(self, text: str) -> TokenIds:
        """Return the tokens of a chunk by itself, for which KV is stored.

        Raises PromptError when ``text`` holds an unpaired surrogate, which no tokenizer can encode.
        """
        return tuple(self._known((text, True)).ids)

    def count(self, text: str) -> int:
        """Return how many tokens a text has by itself; raises PromptError as ``chunk``."""
        _check_surrogates(text)
        return len(self._plain(text))

    def separator(self, text: str) -> TokenIds:
        """Return the tokens of the text between two passages; raises PromptError as ``chunk``.

        Blank lines between words have different tokens than blank lines at the end of a text.
        """
        word = self.chunk(WORD)
        ids = self.chunk(f"{WORD}{text}{WORD}")
        size = len(word)
        if len(ids) > 2 * size and ids[:size] == word == ids[-size:]:
            return ids[size:-size]
        return self.chunk(text)

    def leading(self, text: str, *, opens: bool = True) -> TokenIds:
        """Return the tokens before the first passage of a prompt that begins with ``text``.

        opens: as for ``encode``.
        """
        word = self.chunk(WORD) if text[-1:].isspace() else ()
        ids = self.encode([Segment(f"{text}{WORD}")], opens=opens).token_ids
        if word and ids[-len(word) :] == word:
            return ids[: -len(word)]
        return self.encode([Segment(text)], opens=opens).token_ids

    def encode(self, segments: Sequence[Segment], *, opens: bool = True) -> EncodedPrompt:
        """Encode segments, in order, as one text, and find the chunks in its tokens.

        opens: whether the tokenizer's opening tokens (BOS) come first; never if the text already
        contains them, as rendered chat messages may. Raises PromptError as ``chunk`` does.
        """
        text = "".join(part.text for part in segments)
        _check_surrogates(text)
        known: list[KnownText] = []
        if any(part.is_untrusted for part in segments):
            known = [self._known(self._piece(part)) for part in segments]
            ids = self._joined(segments, known)
            if self._adds_control(ids, segments, known):
                ids = array("i", chain.from_iterable(one.ids for one in known))
        else:  # there is nothing to find in the whole
            ids = array("i", self._plain(text))
        opening = array("i", self.opening)
        has_opening = segments and not segments[0].is_untrusted and ids[: len(opening)] == opening
        start = 0 if has_opening or not opens else len(opening)
        alone = [one.ids for one in known]
        return _placed(segments, alone, opening[:start] + ids, start)

    def _joined(self, segments: Sequence[Segment], known: Sequence[KnownText]) -> array[int]:
        """Return the tokens of all segments as one text; known: those of each by itself."""
        ids, seam, is_first = array("i"), list[Piece](), True
        for part, one in zip(segments, known, strict=True):
            text, is_split = self._piece(part)
            if (inside := one.inside) is None:
                seam.append((text, is_split))
                continue
            seam.append((text[: inside.start], is_split))
            ids.extend(self._whole(seam, is_first))
            ids += one.ids[inside.first : inside.last]
            seam, is_first = [(text[inside.stop :], is_split)], False
        ids.extend(self._whole(seam, is_first))
        return ids

    def _piece(self, part: Segment) -> Piece:
        return part.text, part.is_untrusted

    def _whole(self, pieces: Sequence[Piece], is_first: bool) -> Iterator[int]:
        """Return the tokens of pieces as one text; is_first: whether it begins the prompt."""
        guarded, end = [], 0
        for text, is_split in pieces:
            if is_split:
                guarded.append((end, end + len(text)))
            end += len(text)
        first, *rest = self._pieces("".join(text for text, _ in pieces), guarded)
        begins = self._plain(first) if is_first else self._behind(first)
        return chain(begins, *map(self._behind, rest))

    def _adds_control(
        self, ids: array[int], segments: Sequence[Segment], known: Sequence[KnownText]
    ) -> bool:
        """Whether special tokens come from untrusted text, too, as a normalizer may make them."""
        pairs = zip(segments, known, strict=True)
        own = chain.from_iterable(one.ids for part, one in pairs if not part.is_untrusted)
        return self._specials_in(ids) != self._specials_in(array("i", own))

    def _specials_in(self, ids: array[int]) -> list[int]:
        if self.special_ids.isdisjoint(ids):
            return []
        return [token for token in ids if token in self.special_ids]

    def _known(self, piece: Piece) -> KnownText:
        """Return a piece's tokens by itself, which are encoded if it is not known."""
        return self._known_texts.get(piece, lambda: self._look_at(*piece))

    def _look_at(self, text: str, is_split: bool) -> KnownText:
        _check_surrogates(text)
        ids = array("i", self._whole([(text, is_split)], is_first=False))
        if is_split and not self.special_ids.isdisjoint(ids):
            return KnownText(array("i", self._broken_up(text)))
        has_marker = is_split and any(self._markers.find(text))
        if has_marker or len(text) < SHORTEST or not self._has_cuts:
            return KnownText(ids)
        return KnownText(ids, find_inside(text, ids, self._behind))

    @cached_property
    def _has_cuts(self) -> bool:
        """Whether texts may be cut in words; found out when the first long text is encoded."""
        if any(CUT.search(marker) for marker in self._special.values()):
            return False
        return has_cuts(self.tokenizer, self._plain, self._behind)

    def _broken_up(self, text: str) -> TokenIds:
        """Return a chunk's tokens, without special tokens: texts that look like one are split."""
        ids = self._behind(text)
        if len(text) < 2 or self.special_ids.isdisjoint(ids):
            return ids
        middle = len(text) // 2
        return self._broken_up(text[:middle]) + self._broken_up(text[middle:])

    def _pieces(self, text: str, guarded: Sequence[tuple[int, int]]) -> Iterator[str]:
        """Split a text inside of each special token that lies, or ends, in a guarded range."""
        cuts = {
            at + 1
            for at, end in self._markers.find(text if guarded else "")
            if any(at < stop and end > start for start, stop in guarded)
        }
        for start, stop in pairwise([0, *sorted(cuts), len(text)]):
            yield text[start:stop]

    def _behind(self, text: str) -> TokenIds:
        """Return the tokens of a text as in the middle of a prompt, or else of the text alone."""
        for anchor, expected in self._anchors:
            ids = self._plain(anchor + text)
            if ids[: len(expected)] == expected:
                return ids[len(expected) :]
        return self._plain(text)

    def _plain(self, text: str) -> TokenIds:
        return encode_plainly(self.tokenizer, text)

    def _says(self, ids: Iterable[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _find_anchors(self) -> None:
        """Find out whether texts have to be encoded after an anchor."""
        anchors = tuple((anchor, self._plain(anchor)) for anchor in ANCHORS)
        for self._anchors in ((), tuple((text, ids) for text, ids in anchors if ids)):
            if all(self._keeps(before, after) for before, after in SAMPLES):
                return
        self._anchors = ()

    def _keeps(self, before: str, after: str) -> bool:
        """Whether two texts, encoded separately, decode to their concatenation."""
        apart = self._plain(before) + self._behind(after)
        return self._says(apart) == self._says(self._plain(before + after))


def _placed(
    segments: Sequence[Segment], alone: Sequence[array[int]], ids: array[int], start: int
) -> EncodedPrompt:
    """Find the chunks among a prompt's tokens.

    alone: the tokens of each segment by itself. start: where the text of the first one begins.
    """
    import numpy as np

    from cacheblend_rag.text.runs import find_run

    tokens: Ids = np.asarray(ids, dtype=np.int64)
    near = after = start
    spans, inseparable = list[ChunkSpan](), list[Chunk]()
    for part, own in zip(segments, alone, strict=bool(alone)):
        run = None
        if own and part.is_untrusted:  # other data shows, too, how far the tokens have moved
            run = find_run(tokens, np.asarray(own, dtype=np.int64), near, after)
        if run is not None:
            near, after = run.start - run.skip, run.end
        near += len(own)
        if part.chunk is None or not own:
            continue
        if run is None:
            inseparable.append(part.chunk)
        else:
            edges = tuple(own[: run.skip]), tuple(own[run.skip + run.tokens :])
            spans.append(ChunkSpan(part.chunk, run.start, run.end, *edges))
    return EncodedPrompt(tuple(ids), tuple(spans), tuple(inseparable))


def encode_plainly(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Return the tokens of a text alone, without special tokens around it."""
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def opening_tokens(tokenizer: Tokenizer) -> TokenIds:
    """Return the tokens that the tokenizer puts before a plain prompt: BOS, or nothing.

    Some tokenizers put several tokens there, and some none although they have a BOS token, so a
    sample text is encoded to find out.
    """
    bare = encode_plainly(tokenizer, PROBE)
    full = tuple(tokenizer.encode(PROBE, add_special_tokens=True, verbose=False))
    starts = range(len(full) - len(bare) + 1)
    return full[: next((i for i in starts if full[i : i + len(bare)] == bare), 0)]


def _check_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start} of {text[:20]!r}... is an unpaired surrogate; decode the "
            "source with errors='replace'"
        ) from error
