"""Encodes a prompt as one text, and finds the tokens of its chunks.

The model reads the tokens that it was trained on, those of ``tokenizer(text)``. A chunk's stored KV
belongs to the tokens of the chunk by itself; in the prompt they occur as a run, except for a few at
the edges that the tokenizer joins with the text beside them (see ``runs``).

A chunk is untrusted data: text in it that looks like a special token is encoded as plain text, by
splitting the text inside of it. Hugging Face's ``split_special_tokens`` is not used: it is a switch
in the tokenizer, hence seen by other threads, and it ignores added tokens that are not declared
special although templates use them as such.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cacheblend_rag.errors import PromptError
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
    from cacheblend_rag.text.runs import Ids, Run

TokenIds = tuple[int, ...]
RoleMarkers = Literal["special tokens", "text", "none"]

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


@dataclass(frozen=True, slots=True)
class EncodedParts:
    """A prompt's tokens, and those of its parts; without chunks, of none.

    alone: each part's by itself. runs: where those of a chunk are in the prompt, None if not found.
    """

    token_ids: TokenIds
    alone: Sequence[array[int]] = ()
    runs: Sequence[Run | None] = ()


class PromptEncoder:
    """Encodes prompts with one tokenizer. May be used by several threads at once.

    It keeps the tokens of texts, and encodes only what is new and the seams (see ``known_texts``).
    The tokenizer must not be changed meanwhile. Each tenant has an engine, and so an encoder.

    split_special_tokens: whether chunk text that looks like a special token is encoded as text.
    known_bytes: memory for known texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        split_special_tokens: bool = True,
        known_bytes: int = KNOWN_TEXTS_BYTES,
    ) -> None:
        self.tokenizer = tokenizer
        self.splits_special_tokens = split_special_tokens
        self.opening = opening_tokens(tokenizer)
        self._special = special_tokens(tokenizer)
        # What characters become that the tokenizer does not know (<unk>, say) steers nothing.
        self.special_ids = frozenset(self._special).difference(self._plain(UNKNOWN))
        self._markers = Markers(self._special.values())
        self._anchors: tuple[tuple[str, TokenIds], ...] = ()
        self._find_anchors()
        self._known_texts = KnownTexts(known_bytes)

    @property
    def adds_prefix(self) -> bool:
        """Whether the tokenizer puts a space before each text."""
        return bool(self._anchors)

    def role_markers(self) -> RoleMarkers | None:
        """How the chat template marks roles; None without a template that marks them.

        If the markers are plain text, a passage can imitate them: no tokenizer can tell them apart.
        """
        from jinja2 import TemplateError

        turns = [("user", "alpha"), ("assistant", "beta"), ("user", "gamma")]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=False
                )
            )
        except (TemplateError, TypeError, ValueError):
            return None
        found = re.search("alpha(.*)beta(.*)gamma", text, re.DOTALL)
        kinds: set[RoleMarkers] = (
            {self._kind_of(marker) for marker in found.groups()} if found else set()
        )
        order: tuple[RoleMarkers, ...] = ("text", "special tokens", "none")
        return min(kinds, key=order.index, default="none")

    def _kind_of(self, marker: str) -> RoleMarkers:
        """Classify the text between two turns, without BOS and EOS, which mark no role."""
        roles = dict(getattr(self.tokenizer, "special_tokens_map", {}))
        ends = {roles.get("bos_token"), roles.get("eos_token")}
        left = [token for token in self._plain(marker) if self._special.get(token) not in ends]
        if not self.special_ids.isdisjoint(left):
            return "special tokens"
        return "text" if self._says(left).strip() else "none"

    def chunk(self, text: str) -> TokenIds:
        """Return the tokens of a chunk by itself, for which KV is stored.

        Raises PromptError when ``text`` holds an unpaired surrogate, which no tokenizer can encode.
        """
        return tuple(self._known(text, is_data=True).ids)

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
        ids = self.encode([(f"{text}{WORD}", False)], opens=opens).token_ids
        if word and ids[-len(word) :] == word:
            return ids[: -len(word)]
        return self.encode([(text, False)], opens=opens).token_ids

    def encode(self, parts: Sequence[tuple[str, bool]], *, opens: bool = True) -> EncodedParts:
        """Encode (text, whether it is a chunk or other data), in order, as one text.

        opens: whether the tokenizer's opening tokens (BOS) come first; never if the text already
        contains them, as rendered chat messages may. Raises PromptError as ``chunk`` does.
        """
        for text, _ in parts:
            _check_surrogates(text)
        known: list[KnownText] = []
        if any(is_chunk for _, is_chunk in parts):  # else there is nothing to find in the whole
            known = [self._known(text, is_data=is_chunk) for text, is_chunk in parts]
        alone = [one.ids for one in known]
        ids = self._joined(parts, known)
        if not self._adds_no_control(ids, parts, alone):
            ids = array("i", chain.from_iterable(alone))
        opening = array("i", self.opening)
        has_opening = parts and not parts[0][1] and ids[: len(opening)] == opening
        start = 0 if has_opening or not opens else len(opening)
        ids = opening[:start] + ids
        runs = _placed(parts, alone, ids, start) if known else ()
        return EncodedParts(tuple(ids), alone, runs)

    def _joined(self, parts: Sequence[tuple[str, bool]], known: Sequence[KnownText]) -> array[int]:
        """Return the tokens of all parts as one text; known: each part, if it is known."""
        ids, seam = array("i"), list[tuple[str, bool]]()
        is_first = True
        for (text, is_chunk), one in zip_longest(parts, known):
            if one is None or (inside := one.inside) is None:
                seam.append((text, is_chunk))
                continue
            ids.extend(self._whole([*seam, (text[: inside.start], is_chunk)], is_first))
            ids += one.ids[inside.first : inside.last]
            seam, is_first = [(text[inside.stop :], is_chunk)], False
        ids.extend(self._whole(seam, is_first))
        return ids

    def _whole(self, parts: Sequence[tuple[str, bool]], is_first: bool) -> Iterator[int]:
        """Return the tokens of parts as one text, without special tokens in its chunks.

        is_first: whether it begins the prompt.
        """
        guarded, end = [], 0
        for text, is_chunk in parts:
            if is_chunk and self.splits_special_tokens:
                guarded.append((end, end + len(text)))
            end += len(text)
        first, *rest = self.pieces("".join(text for text, _ in parts), guarded)
        begins = self._plain(first) if is_first else self._behind(first)
        return chain(begins, *map(self._behind, rest))

    def _adds_no_control(
        self, ids: array[int], parts: Sequence[tuple[str, bool]], alone: Sequence[array[int]]
    ) -> bool:
        """Whether all special tokens come from text parts; a normalizer may create others."""
        if not self.splits_special_tokens or not any(is_chunk for _, is_chunk in parts):
            return True
        own = [
            token
            for part, (_, is_chunk) in zip(alone, parts, strict=True)
            if not is_chunk
            for token in self._specials_in(part)
        ]
        return own == self._specials_in(ids)

    def _specials_in(self, ids: array[int]) -> list[int]:
        if self.special_ids.isdisjoint(ids):
            return []
        return [token for token in ids if token in self.special_ids]

    def _known(self, text: str, *, is_data: bool) -> KnownText:
        """Return a part's tokens by itself, which are encoded if it is not known."""
        return self._known_texts.get(text, is_data, lambda: self._look_at(text, is_data))

    def _look_at(self, text: str, is_data: bool) -> KnownText:
        _check_surrogates(text)
        is_split = is_data and self.splits_special_tokens
        pieces = list(self.pieces(text, [(0, len(text))] if is_split else []))
        ids = array("i", chain.from_iterable(map(self._behind, pieces)))
        if is_split and not self.special_ids.isdisjoint(ids):
            return KnownText(array("i", self.broken_up(text)))
        if len(pieces) > 1 or len(text) < SHORTEST or not self._has_cuts:
            return KnownText(ids)
        return KnownText(ids, find_inside(text, ids, self._behind))

    @cached_property
    def _has_cuts(self) -> bool:
        """Whether texts may be cut in words; found out when the first long text is encoded."""
        if any(CUT.search(marker) for marker in self._special.values()):
            return False
        return has_cuts(self.tokenizer, self._plain, self._behind)

    def broken_up(self, text: str) -> TokenIds:
        """Return a chunk's tokens, without special tokens: texts that look like one are split."""
        ids = self._behind(text)
        if len(text) < 2 or self.special_ids.isdisjoint(ids):
            return ids
        middle = len(text) // 2
        return self.broken_up(text[:middle]) + self.broken_up(text[middle:])

    def pieces(self, text: str, guarded: Sequence[tuple[int, int]]) -> Iterator[str]:
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
    parts: Sequence[tuple[str, bool]],
    alone: Sequence[array[int]],
    ids: array[int],
    start: int,
) -> list[Run | None]:
    """Find each chunk's run among a prompt's tokens; start: where its text begins."""
    import numpy as np

    from cacheblend_rag.text.runs import find_run

    tokens: Ids = np.asarray(ids, dtype=np.int64)
    near, after = start, start
    found: list[Run | None] = []
    for own, (_, is_chunk) in zip(alone, parts, strict=True):
        run = find_run(tokens, np.asarray(own, dtype=np.int64), near, after) if is_chunk else None
        if run is not None:
            near, after = run.start - run.skip, run.end
        near += len(own)
        found.append(run)
    return found


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
