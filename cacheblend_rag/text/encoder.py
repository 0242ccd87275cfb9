"""SegmentEncoder: token ids of a prompt's segments that, joined, say the text that was written.

A chunk's tokens must be the same wherever it stands, so each segment is encoded apart from its
neighbours. What that does to the text depends on the tokenizer: many of the SentencePiece kind put
a space before whatever they encode, and some of the WordPiece kind cannot say that two segments
make one word. So each tokenizer is tried when it is loaded, and segments that it cannot keep apart
are encoded as one.

A chunk is data, whoever wrote it: what looks like a special token in it is encoded as the text that
it is, by cutting inside of it. Hugging Face's ``split_special_tokens`` would not do: it is a switch
in the tokenizer, hence seen by other threads, and it leaves out added tokens that are not declared
special although templates use them as such.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

from jinja2 import TemplateError

from cacheblend_rag.errors import PromptError

TokenIds = tuple[int, ...]
Cuts = Literal["anywhere", "between words", "nowhere"]
RoleMarkers = Literal["special tokens", "text", "none"]

PROBE = "a"
ANCHORS = ("\n", ".", "0", "a", "(", "\x01")
"""Segments are encoded behind one of them, whose tokens are then cut off."""
BETWEEN_WORDS = (
    ("Context: ", "Alpha one."),
    ("Alpha one.", " Beta two?"),
    ("Beta two?", "\n\nWhy 42"),
    ("Why 42\n", "and so on"),
)
INSIDE = (("Context:\n(", "alpha"), ("alpha", ") and so"), ("half", "way"), ("19", "84 or so"))
NEAR = 32
"""Characters on either side of a cut that decide whether it may be there."""
CONTROL = re.compile(r"\s*<[|\uff5c].*[|\uff5c]>\s*", re.DOTALL)
"""What tokens that steer models look like, where a tokenizer does not declare them special."""
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """What a prompt asks of a tokenizer; every Hugging Face tokenizer offers it."""

    @property
    def chat_template(self) -> Any:
        """The Jinja template (or templates by name) that renders messages; None without one."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Return token ids; ``verbose`` warns when there are more than the model takes."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Return the text of token ids."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the rendered messages, a str when ``tokenize`` is False."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """What parts of a prompt became.

    spans: of each part that is a chunk, its tokens' (start, end); None where the tokenizer cannot
    keep it apart from what stands beside it, and of all other parts.
    """

    token_ids: TokenIds
    spans: tuple[tuple[int, int] | None, ...]


class SegmentEncoder:
    """Encodes segments with one tokenizer. May be used by several threads at once.

    split_special_tokens: whether what looks like a special token in a chunk is encoded as text.
    """

    def __init__(self, tokenizer: Tokenizer, *, split_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.splits_special_tokens = split_special_tokens
        self.opening = _opening_tokens(tokenizer)
        self._special = _special_tokens(tokenizer)
        self.special_ids = frozenset(self._special)
        self._markers = _by_first_character(self._special.values())
        self._added_ids = self.special_ids.union(getattr(tokenizer, "added_tokens_decoder", ()))
        self._anchors: tuple[tuple[str, TokenIds], ...] = ()
        self.cuts = self._try_cuts()
        self._prefix = self._find_prefix()
        self._prefix_after_added = self._is_prefixed_after_added()

    @property
    def adds_prefix(self) -> bool:
        """Whether the tokenizer puts a space before what it encodes."""
        return bool(self._anchors)

    def role_markers(self) -> RoleMarkers | None:
        """Return what tells a chat template's turns apart; None without a template that says it.

        Where it is text, a passage can imitate it: no tokenizer can tell the two apart.
        """
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
        """Say what stands between two turns, BOS and EOS left out: they say nothing of roles."""
        roles = dict(getattr(self.tokenizer, "special_tokens_map", {}))
        ends = {roles.get("bos_token"), roles.get("eos_token")}
        left = [token for token in self._plain(marker) if self._special.get(token) not in ends]
        if not self.special_ids.isdisjoint(left):
            return "special tokens"
        return "text" if self._says(left).strip() else "none"

    def chunk(self, text: str) -> TokenIds:
        """Return the tokens of a chunk, wherever it stands.

        Raises PromptError when ``text`` holds an unpaired surrogate, which no tokenizer can encode.
        """
        _check_surrogates(text)
        ids = self._run_tokens(self._run(text, 0), is_first=False)
        return self._plain(text) if ids is None else ids

    def encode(self, parts: Sequence[tuple[str, bool]]) -> Encoding:
        """Encode (text, whether it is a chunk) in order, behind the tokenizer's opening tokens.

        The opening (BOS) is not added when the text brings it along, as rendered chat messages do.
        Chunks that yield no token have an empty span. Raises PromptError as ``chunk`` does.
        """
        laid: list[tuple[_Run, TokenIds]] = []
        for index, (text, is_chunk) in enumerate(parts):
            _check_surrogates(text)
            if text:
                self._lay(laid, self._run(text, index if is_chunk else None))
        return self._joined(laid, len(parts))

    def _joined(self, laid: Sequence[tuple[_Run, TokenIds]], parts: int) -> Encoding:
        spans: list[tuple[int, int] | None] = [None] * parts
        own = laid and laid[0][0].part is None and laid[0][1][: len(self.opening)] == self.opening
        token_ids = [] if own else list(self.opening)
        after_added = True
        for index, (run, ids) in enumerate(laid):
            if run.part is not None:
                if index == 0 or (self._prefix_after_added and after_added):
                    token_ids += self._prefix_of(run.text)
                spans[run.part] = (len(token_ids), len(token_ids) + len(ids))
            token_ids += ids
            after_added = bool(token_ids) and token_ids[-1] in self._added_ids
        return Encoding(tuple(token_ids), tuple(spans))

    def _lay(self, laid: list[tuple[_Run, TokenIds]], run: _Run) -> None:
        """Add a run to those laid, as part of the last one where the two cannot be kept apart."""
        ids = self._run_tokens(run, is_first=not laid)
        if ids is not None and (not laid or self._may_cut(laid[-1][0], run)):
            laid.append((run, ids))
        elif laid:
            last, _ = laid.pop()
            self._lay(laid, last.joined_with(run))
        else:
            alone = _Run(run.text, None, run.guarded)
            laid.append((alone, self._run_tokens(alone, is_first=True) or ()))

    def _may_cut(self, before: _Run, after: _Run) -> bool:
        if self.cuts == "nowhere" or (before.part is None and after.part is None):
            return False
        if self.cuts == "anywhere":
            return True
        tail, head = before.text[-NEAR:], after.text[:NEAR]
        return self._plain(tail + head) == self._plain(tail) + self._plain(head)

    def _run(self, text: str, part: int | None) -> _Run:
        guarded = part is not None and self.splits_special_tokens
        return _Run(text, part, ((0, len(text)),) if guarded else ())

    def _run_tokens(self, run: _Run, *, is_first: bool) -> TokenIds | None:
        """Return a run's tokens, or None when it cannot be kept apart from what is before it."""
        pieces = list(self._pieces(run))
        if is_first and run.part is None:
            ids: TokenIds | None = self._plain(pieces[0])
        elif is_first and self._prefix is None:
            ids = None
        else:
            ids = self._later(pieces[0])
        if ids is None:
            return None
        for piece in pieces[1:]:
            ids += self._later(piece) or self._plain(piece)
        if run.part is not None and run.guarded and not self.special_ids.isdisjoint(ids):
            return self._broken(run.text)
        return ids

    def _broken(self, text: str) -> TokenIds:
        """Return tokens of a chunk's text among which no special token is, by cutting it up."""
        later = self._later(text)
        ids = self._plain(text) if later is None else later
        if len(text) < 2 or self.special_ids.isdisjoint(ids):
            return ids
        middle = len(text) // 2
        return self._broken(text[:middle]) + self._broken(text[middle:])

    def _pieces(self, run: _Run) -> Iterator[str]:
        """Cut a run inside of each special token that lies, or ends, in what is guarded."""
        cuts = {
            at + 1
            for at, end in self._found_markers(run.text if run.guarded else "")
            if any(at < stop and end > start for start, stop in run.guarded)
        }
        edges = [0, *sorted(cuts), len(run.text)]
        for start, stop in pairwise(edges):
            yield run.text[start:stop]

    def _found_markers(self, text: str) -> Iterator[tuple[int, int]]:
        for first, markers in self._markers.items():
            if first not in text:
                continue
            for marker in markers:
                at = text.find(marker)
                while at >= 0:
                    yield at, at + len(marker)
                    at = text.find(marker, at + 1)

    def _later(self, text: str) -> TokenIds | None:
        """Return the tokens of a text that others stand before; None when that cannot be said."""
        if not self._anchors:
            return self._plain(text)
        for anchor, expected in self._anchors:
            ids = self._plain(anchor + text)
            if ids[: len(expected)] == expected:
                return ids[len(expected) :]
        return None

    def _plain(self, text: str) -> TokenIds:
        return encode_plainly(self.tokenizer, text)

    def _says(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _try_cuts(self) -> Cuts:
        """Find out where segments may be cut, and whether they have to stand behind an anchor."""
        anchors = tuple((anchor, self._plain(anchor)) for anchor in ANCHORS)
        for self._anchors in ((), tuple((text, ids) for text, ids in anchors if ids)):
            if self._keeps(BETWEEN_WORDS + INSIDE):
                return "anywhere"
        self._anchors = ()
        return "between words" if self._keeps(BETWEEN_WORDS) else "nowhere"

    def _keeps(self, samples: Iterable[tuple[str, str]]) -> bool:
        for before, after in samples:
            later = self._later(after)
            if later is None:
                return False
            if self._says(self._plain(before) + later) != self._says(self._plain(before + after)):
                return False
        return True

    def _find_prefix(self) -> TokenIds | None:
        """Return the tokens that stand before a text's first in its encoding; None if unknown."""
        if not self._anchors:
            return ()
        for text in ANCHORS:
            alone, later = self._plain(text), self._later(text) or ()
            prefix = alone[: len(alone) - len(later)]
            if later and prefix and prefix + later == alone and self._is_prefix(prefix):
                return prefix
        return None

    def _prefix_of(self, text: str) -> TokenIds:
        """Return what the tokenizer puts before this text; some put nothing before a space."""
        if not self._prefix:
            return ()
        behind, head = self._anchors[0][1], text[:NEAR]
        alone, later = self._says(behind + self._plain(head)), self._later(head) or ()
        return () if self._says(behind + later) == alone else self._prefix

    def _is_prefix(self, prefix: TokenIds) -> bool:
        return all(
            self._says(prefix + (self._later(text) or ())) == self._says(self._plain(text))
            for text, _ in BETWEEN_WORDS
        )

    def _is_prefixed_after_added(self) -> bool:
        for special in getattr(self.tokenizer, "all_special_tokens", ()) if self._anchors else ():
            before = self._plain(special)
            if len(before) == 1 and before[0] in self.special_ids:
                text = BETWEEN_WORDS[0][0]
                return self._plain(special + text) == before + self._plain(text)
        return False


@dataclass(frozen=True, slots=True)
class _Run:
    """Text that is encoded as one.

    part: index of the part that it is, if that is a chunk. guarded: (start, end) of the characters
    in which there are no special tokens, whatever it looks like.
    """

    text: str
    part: int | None
    guarded: tuple[tuple[int, int], ...] = field(default=())

    def joined_with(self, other: _Run) -> _Run:
        moved = tuple(
            (start + len(self.text), end + len(self.text)) for start, end in other.guarded
        )
        return _Run(self.text + other.text, None, self.guarded + moved)


def encode_plainly(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Return what the tokenizer makes of a text alone, without special tokens around it."""
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _opening_tokens(tokenizer: Tokenizer) -> TokenIds:
    """Return what the tokenizer puts before a plain prompt: the BOS token, or nothing.

    Some tokenizers put several tokens there, and some none although they have a BOS token, so it is
    read off an encoded probe.
    """
    bare = encode_plainly(tokenizer, PROBE)
    full = tuple(tokenizer.encode(PROBE, add_special_tokens=True, verbose=False))
    starts = range(len(full) - len(bare) + 1)
    return full[: next((i for i in starts if full[i : i + len(bare)] == bare), 0)]


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the tokens that a chunk may not hold, by id.

    Those are the special tokens, and added ones that look like them or that the chat template
    names. Other added tokens, such as HTML's tags, are words like others. The token for what is
    unknown is none of them, unless it plays another role, too; bytes are none.
    """
    roles = dict(getattr(tokenizer, "special_tokens_map", {}))
    unknown = roles.pop("unk_token", None)
    others = {text for role in roles.values() for text in _texts(role)}
    ids, texts = (getattr(tokenizer, f"all_special_{what}", ()) for what in ("ids", "tokens"))
    named = dict(zip(ids, texts, strict=True))
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        text = token.content
        named_there = len(text.strip()) > 1 and text in template
        if token.special or named_there or CONTROL.fullmatch(text):
            named[token_id] = token.content
    return {
        token_id: text
        for token_id, text in named.items()
        if (text != unknown or text in others) and not BYTE.fullmatch(text)
    }


def _by_first_character(texts: Iterable[str]) -> dict[str, list[str]]:
    """Sort texts that can be cut; most passages hold none of the characters these begin with."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for text in {text for text in texts if len(text) > 1}:
        found[text[0]].append(text)
    return dict(found)


def _texts(role: object) -> list[str]:
    return [str(text) for text in role] if isinstance(role, list | tuple) else [str(role)]


def _check_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start} of {text[:20]!r}... is an unpaired surrogate; decode the "
            "source with errors='replace'"
        ) from error
