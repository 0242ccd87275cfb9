"""The KV of a conversation's own tokens: which of it is stored, and where a prompt can reuse it.

A turn's own tokens are those that are no registered chunk's: the question, the answer, the marks
between them. After an answer their KV is cut out of the request's cache into *segments*. In later
prompts of the conversation the segments' tokens are found again, wherever they stand by then, and
their KV is reused like that of chunks.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter

from cacheblend_rag.errors import ConfigError, first_line
from cacheblend_rag.kv.chunk_kv import NAMESPACE_DIGITS, KVKey, chunk_id, prefix_ids
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.text.token_index import TokenIndex, TokenRun

LEAST_TOKENS = 8
"""Fewest tokens of a segment, and of a part of it that is reused."""
LEAST_SHARE = 0.5
"""Of a segment's tokens that a prompt must hold: less may be another text that begins alike."""
MOST_TURNS = 256
MOST_BYTES = 1 << 30
WAIT_SECONDS = 5.0
"""How long it is waited for KV that is being written."""
ID_BYTES = 16

TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
Count = Annotated[int, Field(strict=True, ge=0)]
Span = tuple[int, int]
"""Tokens [start, end) of a prompt."""


def turn_fingerprint(fingerprint: str) -> str:
    """Return the fingerprint of conversations' KV, given that of chunk KV.

    It has the same namespace, and is never that of chunks: they are listed and evicted by it.
    """
    rest = hashlib.blake2b(f"turn {fingerprint}".encode(), digest_size=16).hexdigest()
    return fingerprint[:NAMESPACE_DIGITS] + rest


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """Consecutive tokens of a turn whose KV is stored.

    fingerprint: see ``turn_fingerprint``. before: ``prefix_ids`` of the tokens before it, as it was
    computed. start: its position then. is_exact: whether its KV was that of full prefill. nbytes:
    of its KV.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    fingerprint: str
    before: str
    start: Count
    is_exact: Annotated[bool, Field(strict=True)]
    nbytes: Count

    def key(self, conversation_id: str) -> KVKey:
        """Return the key of its KV, which no one can make without the conversation's id."""
        secret = conversation_id.encode()
        context = hashlib.blake2b(self.before.encode(), digest_size=16, key=secret).hexdigest()
        return KVKey(chunk_id(self.token_ids), self.fingerprint, context)


_TURNS = TypeAdapter(list[list[TurnSegment]])


@dataclass(eq=False)
class KeptTurn:
    """The segments of one turn, in order.

    is_pending: whether they are being written. patience: seconds that a prompt waits until they
    are.
    """

    segments: list[TurnSegment]
    is_pending: bool = False
    patience: float = WAIT_SECONDS

    @property
    def nbytes(self) -> int:
        """Bytes of their KV."""
        return sum(segment.nbytes for segment in self.segments)


class ConversationKV:
    """Which KV of one conversation's own tokens is stored. Safe to share between threads.

    Give an engine the conversation's prompts as TurnPrompts: the KV of the turns before is reused,
    and after the answer that of the new one is kept. Conversations never share KV, even if their
    texts are the same.

    Attributes:
        conversation_id: names the conversation in the store. It is a secret: who knows it can
            resume the conversation, or evict its KV.
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
        self._most_turns, self._most_bytes = most_turns, most_bytes
        self._changed = Condition()
        self._turns: list[KeptTurn] = []
        self._index: tuple[str, TokenIndex[TurnSegment]] | None = None

    @property
    def turns(self) -> int:
        """For how many turns KV is stored."""
        with self._changed:
            return len(self._stored())

    @property
    def nbytes(self) -> int:
        """Bytes of the stored KV."""
        with self._changed:
            return sum(turn.nbytes for turn in self._stored())

    def keys(self) -> list[KVKey]:
        """Return the keys of all stored KV."""
        with self._changed:
            return self._keys(self._stored())

    # Question time

    def find(
        self,
        token_ids: Sequence[int],
        begin: int,
        taken: Iterable[Span],
        end: int,
        fingerprint: str,
    ) -> list[PlacedChunk]:
        """Return the parts of stored segments in a prompt's tokens [begin, end), in order.

        Waits for KV that is being written.

        Args:
            token_ids: the prompt's.
            begin: index of the first token to look at.
            taken: spans of the prompt in which none is looked for, in order.
            end: index behind the last token to look at.
            fingerprint: of chunk KV.
        """
        index = self._indexed(turn_fingerprint(fingerprint))
        if not len(index):
            return []
        gaps = gaps_between(begin, taken, end)
        runs = [run for start, stop in gaps for run in index.find(token_ids, start, stop)]
        held = Counter[TurnSegment]()
        for run in runs:
            held[run.name] += run.end - run.start
        kept = [run for run in runs if held[run.name] >= LEAST_SHARE * len(run.name.token_ids)]
        exact = exact_runs(token_ids, kept)
        return [self._placed(run, is_exact) for run, is_exact in zip(kept, exact, strict=True)]

    def _indexed(self, fingerprint: str) -> TokenIndex[TurnSegment]:
        """Return the index of the segments under a fingerprint; the latest were added first."""
        with self._changed:
            waiting = [turn.patience for turn in self._turns if turn.is_pending]
            self._changed.wait_for(self._is_settled, max(waiting, default=0.0))
            if self._index is None or self._index[0] != fingerprint:
                index = TokenIndex[TurnSegment](LEAST_TOKENS)
                index.add_many(
                    (segment.token_ids, segment)
                    for turn in reversed(self._stored())
                    for segment in turn.segments
                    if segment.fingerprint == fingerprint
                )
                self._index = fingerprint, index
            return self._index[1]

    def _stored(self) -> list[KeptTurn]:
        return [turn for turn in self._turns if not turn.is_pending]

    def _is_settled(self) -> bool:
        return not any(turn.is_pending for turn in self._turns)

    def _placed(self, run: TokenRun[TurnSegment], is_exact: bool) -> PlacedChunk:
        segment = run.name
        return PlacedChunk(
            key=segment.key(self.conversation_id),
            start=run.start,
            end=run.end,
            before=segment.token_ids[: run.skip],
            after=segment.token_ids[run.skip + run.end - run.start :],
            is_turn=True,
            is_exact=is_exact,
        )

    # After an answer

    def begin(self, segments: Sequence[TurnSegment], *, patience: float = WAIT_SECONDS) -> KeptTurn:
        """Add a turn whose segments are being written, and return it for ``written``.

        Args:
            segments: of the turn.
            patience: seconds that the next prompts wait until they are written, at most.
        """
        turn = KeptTurn(list(segments), is_pending=True, patience=patience)
        with self._changed:
            self._turns.append(turn)
        return turn

    def is_newest(self, turn: KeptTurn) -> bool:
        """Whether no turn was begun after this one, nor was it forgotten."""
        with self._changed:
            return bool(self._turns) and self._turns[-1] is turn

    def is_forgotten(self, turn: KeptTurn) -> bool:
        """Whether a turn was forgotten since it was begun."""
        with self._changed:
            return turn not in self._turns

    def written(self, turn: KeptTurn, stored: Collection[KVKey]) -> list[KVKey]:
        """Keep those of a turn's segments that were stored; returns keys to evict, by the bounds.

        A turn that was forgotten meanwhile is evicted.

        Args:
            turn: what ``begin`` returned.
            stored: keys of its segments that are stored by now.
        """
        with self._changed:
            turn.is_pending, self._index = False, None
            turn.segments = [
                segment for segment in turn.segments if segment.key(self.conversation_id) in stored
            ]
            dropped = [*self._beyond_bounds(), *([] if turn in self._turns else turn.segments)]
            self._turns = [one for one in self._turns if one.segments or one.is_pending]
            left = set(self._keys(self._turns))
            self._changed.notify_all()
            return [key for key in self.keys_of(dropped) if key not in left]

    def _beyond_bounds(self) -> list[TurnSegment]:
        """Take out the oldest turns' segments, the first ones first, until the bounds are kept."""
        nbytes, dropped = sum(turn.nbytes for turn in self._turns), list[TurnSegment]()
        surplus = len(self._turns) - self._most_turns
        for index, turn in enumerate(self._turns):
            # A turn that is being written is looked at once it is: it cannot be evicted before.
            while (
                turn.segments
                and not turn.is_pending
                and (index < surplus or nbytes > self._most_bytes)
            ):
                dropped.append(turn.segments.pop(0))
                nbytes -= dropped[-1].nbytes
        return dropped

    def forget(self) -> list[KVKey]:
        """Forget all turns; returns the keys to evict."""
        with self._changed:
            keys, self._turns, self._index = self._keys(self._turns), [], None
            self._changed.notify_all()
            return keys

    def keys_of(self, segments: Iterable[TurnSegment]) -> list[KVKey]:
        """Return the keys of segments of this conversation."""
        return [segment.key(self.conversation_id) for segment in segments]

    def _keys(self, turns: Iterable[KeptTurn]) -> list[KVKey]:
        return [key for turn in turns for key in self.keys_of(turn.segments)]

    # Saving

    def to_plain(self) -> dict[str, Any]:
        """Return plain JSON values: the id and what is stored, no KV. Waits for what is written."""
        with self._changed:
            self._changed.wait_for(self._is_settled, WAIT_SECONDS)
            turns = _TURNS.dump_python([turn.segments for turn in self._stored()], mode="json")
        return {
            "conversation_id": self.conversation_id,
            "most_turns": self._most_turns,
            "most_bytes": self._most_bytes,
            "turns": turns,
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """Return the conversation that ``to_plain`` made these values of.

        Args:
            plain: the values.

        Raises:
            ConfigError: for anything else.
        """
        fields = {"conversation_id", "most_turns", "most_bytes", "turns"}
        if not isinstance(plain, Mapping) or set(plain) != fields:
            raise ConfigError(f"a conversation's KV must have {', '.join(sorted(fields))}")
        if plain["conversation_id"] is None:
            raise ConfigError("a conversation's KV must have an id")
        made = cls(**{name: plain[name] for name in fields - {"turns"}})
        try:
            turns = _TURNS.validate_python(plain["turns"])
            made._turns = [KeptTurn(segments) for segments in turns]
            made.keys()  # which are malformed if a fingerprint is
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"a conversation's turns are malformed: {first_line(error)}"
            ) from None
        return made


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt and its answer, of which a conversation's own tokens are kept.

    token_ids: whose KV is in the request's cache. begin: index of the first token to keep. taken:
    spans whose KV is stored already, or belongs to documents, in order. exact_until: the KV of
    segments that begin by then is that of full prefill. fingerprint: of chunk KV. token_bytes: of
    one token's KV.
    """

    token_ids: Sequence[int]
    begin: int
    taken: Sequence[Span]
    exact_until: int
    fingerprint: str
    token_bytes: int

    def segments(self) -> list[TurnSegment]:
        """Return the segments to keep; shorter runs of tokens are left out."""
        gaps = gaps_between(self.begin, self.taken, len(self.token_ids))
        long = [(start, end) for start, end in gaps if end - start >= LEAST_TOKENS]
        hashes = prefix_ids(self.token_ids, [start for start, _ in long])
        return [
            TurnSegment(
                token_ids=tuple(self.token_ids[start:end]),
                fingerprint=turn_fingerprint(self.fingerprint),
                before=before,
                start=start,
                is_exact=start <= self.exact_until,
                nbytes=(end - start) * self.token_bytes,
            )
            for (start, end), before in zip(long, hashes, strict=True)
        ]


def exact_runs(token_ids: Sequence[int], runs: Sequence[TokenRun[TurnSegment]]) -> list[bool]:
    """Return whether each run's KV is that of full prefill of a prompt.

    It is if the segment's was, and the prompt begins with the same tokens up to the run's end.
    """
    ends = sorted({run.name.start for run in runs if run.name.start <= len(token_ids)})
    before = dict(zip(ends, prefix_ids(token_ids, ends), strict=True))
    return [
        run.name.is_exact
        and run.start - run.skip == run.name.start
        and before.get(run.name.start) == run.name.before
        and tuple(token_ids[run.name.start : run.start]) == run.name.token_ids[: run.skip]
        for run in runs
    ]


def gaps_between(begin: int, taken: Iterable[Span], end: int) -> Iterator[Span]:
    """Yield the spans of [begin, end) that are not taken; taken: spans in order."""
    for start, stop in taken:
        if begin < min(start, end):
            yield begin, min(start, end)
        begin = max(begin, stop)
    if begin < end:
        yield begin, end


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in text)
