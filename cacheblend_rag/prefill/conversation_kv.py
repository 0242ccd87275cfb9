"""A conversation's turns as documents of its own, whose chunks nobody else can name.

A turn's own tokens are those that are no registered chunk's: the question, the answer, the marks
between them. After an answer they become the next chunks of the conversation's document. Their KV
is computed in idle time, after the document's tokens before them: the instruction and the earlier
turns. In later prompts the chunks are found by their tokens, wherever these stand by then, and
reused like other chunks.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Condition
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter

from cacheblend_rag.errors import ConfigError, first_line
from cacheblend_rag.kv.chunk_kv import NAMESPACE_DIGITS, KVKey, chunk_id, prefix_ids
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.text.token_index import TokenIndex

LEAST_TOKENS = 8
"""Fewest tokens of a turn's chunk."""
DOCUMENT_TOKENS = 8192
"""Most tokens of a document; the turn that would exceed them begins another one."""
MOST_TURNS = 256
MOST_BYTES = 1 << 30
WAIT_SECONDS = 5.0
"""How long a prompt waits for turns that are being filled."""
LOOK_SECONDS = 0.02
ID_BYTES = 16

Count = Annotated[int, Field(strict=True, ge=0)]
TokenIds = tuple[Annotated[int, Field(strict=True, ge=0, lt=1 << 32)], ...]
Turn = tuple[Annotated[TokenIds, Field(min_length=1)], ...]
"""The chunks of a turn, in order."""
Span = tuple[int, int]
"""Tokens [start, end) of a prompt."""
Filling = Callable[[], bool]
"""A filling of turns, queued or begun: tells whether it may be over soon."""


def turn_fingerprint(fingerprint: str) -> str:
    """Return the fingerprint of conversations' KV, given that of chunk KV.

    It has the same namespace, and is never that of chunks: they are listed and evicted by it.
    """
    rest = hashlib.blake2b(f"turn {fingerprint}".encode(), digest_size=16).hexdigest()
    return fingerprint[:NAMESPACE_DIGITS] + rest


def turn_context(before: str, conversation: str) -> str:
    """Return the context id of a turn's chunk: nobody else can name its KV.

    Args:
        before: the hash of all tokens before it, as ``prefix_ids`` returns it.
        conversation: the conversation's key.
    """
    return hashlib.blake2b(before.encode(), digest_size=16, key=conversation.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TurnDocument:
    """Turns whose KV is computed one after another.

    fingerprint: see ``turn_fingerprint``. lead: the tokens before the first turn. token_bytes: of
    one token's KV.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    fingerprint: str
    lead: TokenIds
    token_bytes: Count
    turns: tuple[Turn, ...] = ()

    @property
    def chunks(self) -> list[TokenIds]:
        """The chunks of all turns."""
        return [chunk for turn in self.turns for chunk in turn]

    @property
    def nbytes(self) -> int:
        """Bytes of the KV."""
        return self.token_bytes * sum(map(len, self.chunks))

    def plans(self, conversation: str) -> list[ChunkPlan]:
        """Return the chunks with the tokens before them; conversation: its key."""
        chunks, lead = self.chunks, len(self.lead)
        whole = (*self.lead, *(token for chunk in chunks for token in chunk))
        *starts, _ = accumulate(map(len, chunks), initial=lead)
        found = zip(chunks, starts, prefix_ids(whole, starts), strict=True)
        return [
            ChunkPlan(
                chunk, self.lead, whole[lead:start], self._key(chunk, before, conversation), True
            )
            for chunk, start, before in found
        ]

    def _key(self, chunk: TokenIds, before: str, conversation: str) -> KVKey:
        """Return the key of a chunk; before: the hash of the tokens before it."""
        return KVKey(chunk_id(chunk), self.fingerprint, turn_context(before, conversation))


_DOCUMENTS = TypeAdapter(tuple[TurnDocument, ...])


class ConversationKV:
    """The turns of one conversation whose KV is kept. Safe to share between threads.

    Give an engine the conversation's prompts as TurnPrompts: the KV of the turns before is reused,
    and after the answer that of the new one is kept. Conversations never share KV, even if their
    texts are the same.

    Attributes:
        conversation_id: is a secret, which never leaves this process but by ``to_plain``: who knows
            it can resume the conversation.
        key: a hash of it, by which the KV of turns is named, found and evicted; servers get it.
    """

    def __init__(
        self,
        conversation_id: str | None = None,
        *,
        most_turns: int = MOST_TURNS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Begin a conversation.

        Args:
            conversation_id: 32 hex digits; drawn by default.
            most_turns: for so many turns KV is kept; that of the oldest is evicted.
            most_bytes: so many bytes of KV are kept at most.

        Raises:
            ConfigError: when the id is malformed, or a bound is negative.
        """
        drawn = secrets.token_hex(ID_BYTES) if conversation_id is None else conversation_id
        if not isinstance(drawn, str) or len(drawn) != 2 * ID_BYTES or not _is_hex(drawn):
            raise ConfigError(f"a conversation's id must be {2 * ID_BYTES} hex digits")
        for name, most in (("most_turns", most_turns), ("most_bytes", most_bytes)):
            if type(most) is not int or most < 0:
                raise ConfigError(f"{name}={most!r} must be an integer of at least 0")
        self.conversation_id = drawn
        self.key = hashlib.blake2b(b"turns", digest_size=ID_BYTES, key=drawn.encode()).hexdigest()
        self._most_turns, self._most_bytes = most_turns, most_bytes
        self._changed = Condition()
        self._documents: tuple[TurnDocument, ...] = ()
        self._fillings: set[Filling] = set()

    @property
    def turns(self) -> int:
        """For how many turns KV is kept."""
        return sum(len(one.turns) for one in self._documents)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept KV."""
        return sum(one.nbytes for one in self._documents)

    def keys(self) -> list[KVKey]:
        """Return the keys of all kept KV."""
        return [plan.key for one in self._documents for plan in one.plans(self.key)]

    def plans(self, fingerprint: str) -> list[list[ChunkPlan]]:
        """Return the chunks of each document under a ``turn_fingerprint``."""
        told = (one for one in self._documents if one.fingerprint == fingerprint)
        return [one.plans(self.key) for one in told]

    def settle(self) -> None:
        """Wait until turns that may be stored soon are stored: before a prompt is searched."""
        self._settle(lambda is_near: is_near())

    def _settle(self, is_waited_for: Callable[[Filling], bool]) -> None:
        """Wait until turns are filled."""
        until = time.monotonic() + WAIT_SECONDS
        with self._changed:
            while any(map(is_waited_for, self._fillings)) and time.monotonic() < until:
                self._changed.wait(LOOK_SECONDS)

    # After an answer

    def known_until(self, token_ids: Sequence[int], gaps: Iterable[Span]) -> int:
        """Return where the last part of a known turn ends in a prompt with its answer, 0 without.

        The last tokens of a turn may be the first ones of the question behind it.

        Args:
            token_ids: of prompt and answer.
            gaps: the spans in which turns are looked for.
        """
        chunks = [chunk for one in self._documents for chunk in one.chunks]
        index = TokenIndex[int](LEAST_TOKENS)
        index.add((chunk, number) for number, chunk in enumerate(chunks))
        found = [one for start, end in gaps for one in index.find(token_ids, start, end)]
        rests = (chunks[one.name][one.stop :] for one in found)
        ends = (
            one.end + len(common_prefix(rest, token_ids[one.end :]))
            for one, rest in zip(found, rests, strict=True)
        )
        return max(ends, default=0)

    def add(
        self, runs: Iterable[Sequence[int]], document: TurnDocument, most_tokens: int
    ) -> list[KVKey]:
        """Add a turn, and drop the oldest ones beyond the bounds; returns the keys to evict.

        A prompt that is answered once more adds nothing, unless its answer is another one.

        Args:
            runs: its own tokens, between those of chunks; short ones are left out.
            document: an empty one, that the turn begins unless it goes on with an earlier one.
            most_tokens: of a document, by what the engine can compute at once.
        """
        turn = tuple(tuple(run) for run in runs if len(run) >= LEAST_TOKENS)
        with self._changed:
            before = [one for one in self._documents if replace(one, turns=()) == document]
            if not turn or (before and turn == before[-1].turns[-1]):
                return []
            self._append(replace(document, turns=(turn,)), min(most_tokens, DOCUMENT_TOKENS))
            gone = list[KVKey]()
            while self.turns > self._most_turns or self.nbytes > self._most_bytes:
                gone += [plan.key for plan in self._documents[0].plans(self.key)]
                self._documents = self._documents[1:]
            return gone

    def _append(self, new: TurnDocument, most_tokens: int) -> None:
        """Add a turn to the latest document that it may go on with, or as another one.

        A document takes half of the bounds at most, since it is dropped as a whole.
        """
        for at in reversed(range(len(self._documents))):
            before = self._documents[at]
            longer = replace(before, turns=(*before.turns, *new.turns))
            if (
                longer == replace(new, turns=longer.turns)
                and len(longer.lead) + sum(map(len, longer.chunks)) <= most_tokens
                and 2 * len(longer.turns) <= self._most_turns
                and 2 * longer.nbytes <= self._most_bytes
            ):
                self._documents = (*self._documents[:at], longer, *self._documents[at + 1 :])
                return
        self._documents = (*self._documents, new)

    def begin_filling(self, filling: Filling) -> None:
        """Note that the turns are to be filled."""
        with self._changed:
            self._fillings.add(filling)

    def end_filling(self, filling: Filling) -> None:
        """Note that a filling is over: done, failed or given up."""
        with self._changed:
            self._fillings.discard(filling)
            self._changed.notify_all()

    def is_forgotten(self, filling: Filling) -> bool:
        """Whether the turns were forgotten since a filling began."""
        return filling not in self._fillings

    def forget(self) -> list[KVKey]:
        """Forget all turns; returns the keys to evict."""
        with self._changed:
            keys, self._documents = self.keys(), ()
            self._fillings.clear()
            self._changed.notify_all()
            return keys

    # Saving

    def to_plain(self) -> dict[str, Any]:
        """Return plain JSON values: the id and the turns, no KV. Waits for what is filled."""
        self._settle(lambda _: True)
        return {
            "conversation_id": self.conversation_id,
            "most_turns": self._most_turns,
            "most_bytes": self._most_bytes,
            "documents": _DOCUMENTS.dump_python(self._documents, mode="json"),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """Return the conversation that ``to_plain`` made these values of.

        Args:
            plain: the values.

        Raises:
            ConfigError: for anything else.
        """
        fields = {"conversation_id", "most_turns", "most_bytes", "documents"}
        if not isinstance(plain, Mapping) or set(plain) != fields:
            raise ConfigError(f"a conversation's KV must have {', '.join(sorted(fields))}")
        if plain["conversation_id"] is None:
            raise ConfigError("a conversation's KV must have an id")
        made = cls(**{name: plain[name] for name in fields - {"documents"}})
        try:
            made._documents = _DOCUMENTS.validate_python(plain["documents"])
            made.keys()  # which are malformed if a fingerprint is
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"a conversation's turns are malformed: {first_line(error)}"
            ) from None
        return made


def gaps_between(begin: int, taken: Iterable[Span], end: int) -> Iterator[Span]:
    """Yield the spans of [begin, end) that are not taken; taken: spans in order."""
    for start, stop in taken:
        if begin < min(start, end):
            yield begin, min(start, end)
        begin = max(begin, stop)
    if begin < end:
        yield begin, end


def common_prefix(tokens: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    """Return the tokens that two sequences begin with."""
    pairs = enumerate(zip(tokens, others, strict=False))
    least = min(len(tokens), len(others))
    return tokens[: next((at for at, (one, other) in pairs if one != other), least)]


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in text)
