"""Reasons of misses, refusals and fall-backs: a stable code and a sentence."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Self

from pydantic_core import core_schema


class ReasonCode(StrEnum):
    """The kind of a reason; sentences may change and hold numbers, codes do neither."""

    # A chunk was missed, or could not be stored
    UNKNOWN = "unknown"
    ALTERED_TEXT = "altered_text"
    INSEPARABLE = "inseparable"
    NOT_STORED = "not_stored"
    BEING_FILLED = "being_filled"
    OTHER_MODEL = "other_model"
    DAMAGED = "damaged"
    BAD_SIGNATURE = "bad_signature"
    STORE_ERROR = "store_error"
    STORE_FULL = "store_full"
    READ_ONLY = "read_only"
    NO_ROOM = "no_room"
    SLOW = "slow"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    EMPTY = "empty"
    NOT_FINITE = "not_finite"
    FORGOTTEN = "forgotten"
    MODEL_CHANGED = "model_changed"

    # A model, a server or a request cannot be blended
    UNSUPPORTED_MODEL = "unsupported_model"
    UNSUPPORTED_POSITIONS = "unsupported_positions"
    UNSUPPORTED_ATTENTION = "unsupported_attention"
    UNSUPPORTED_LAYERS = "unsupported_layers"
    UNSUPPORTED_SETTING = "unsupported_setting"
    UNSUPPORTED_REQUEST = "unsupported_request"

    # Ordinary prefill served a prompt
    FULL_PREFILL_ASKED = "full_prefill_asked"
    NO_CHUNK = "no_chunk"
    UNREADABLE = "unreadable"
    PREFIX_CACHED = "prefix_cached"
    CANCELLED = "cancelled"
    NO_CONNECTOR = "no_connector"
    NO_ANSWER = "no_answer"
    MALFORMED_JOB = "malformed_job"
    FAILED = "failed"

    # The selector, ratio or load differs from the requested one
    CONTEXT_KEPT = "context_kept"
    EXACT = "exact"
    NO_PRIOR = "no_prior"
    SOME_SLOW = "some_slow"

    # The guard's
    GUARD_RAISED = "guard_raised"
    GUARD_STOPPED = "guard_stopped"

    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> ReasonCode | None:
        """Return ``other`` for a code that a newer version added."""
        return cls.OTHER if isinstance(value, str) else None


class Reason(str):
    """A sentence with its ``code``; a str in every other respect."""

    __slots__ = ("code",)
    code: ReasonCode

    def __new__(cls, code: ReasonCode, sentence: str) -> Self:
        """Create the sentence with its code."""
        made = super().__new__(cls, sentence)
        made.code = code
        return made

    def __getnewargs__(self) -> tuple[ReasonCode, str]:  # type: ignore[override]
        """Return the arguments for copying and unpickling."""
        return self.code, str(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: Any) -> core_schema.CoreSchema:
        """A reason travels as [code, sentence]; the code may be a newer version's."""
        return core_schema.no_info_after_validator_function(
            lambda row: cls(ReasonCode(row[0]), row[1]),
            handler.generate_schema(tuple[str, str]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda reason: [reason.code.value, str(reason)]
            ),
        )


class Miss:
    """Why chunks of prompts are missed."""

    UNKNOWN: Final = Reason(ReasonCode.UNKNOWN, "unknown")
    """It was given as a chunk, but never registered."""
    NOT_STORED: Final = Reason(ReasonCode.NOT_STORED, "not stored")
    """It is registered, but its KV is in no tier."""
    BEING_FILLED: Final = Reason(ReasonCode.BEING_FILLED, "not stored, being filled")
    """As NOT_STORED, and it will be computed in idle time (``fill_on_miss``)."""
    OTHER_MODEL: Final = Reason(ReasonCode.OTHER_MODEL, "other model")
    """Stored KV belongs to another model, tokenizer, lead-in or namespace."""
    INSEPARABLE: Final = Reason(ReasonCode.INSEPARABLE, "inseparable")
    """The tokenizer merges its tokens with those of the text beside it."""
    ALTERED_TEXT: Final = Reason(ReasonCode.ALTERED_TEXT, "altered text")
    """The text differs from the chunk that the hint named."""
    DAMAGED: Final = Reason(ReasonCode.DAMAGED, "damaged")
    """Stored bytes failed their checksum and were quarantined."""
    BAD_SIGNATURE: Final = Reason(ReasonCode.BAD_SIGNATURE, "bad signature")
    """Written without the store's key, or with a key that this store does not have."""
    STORE_ERROR: Final = Reason(ReasonCode.STORE_ERROR, "store error")
    """A tier could not be read."""
    NO_ROOM: Final = Reason(ReasonCode.NO_ROOM, "no room")
    """There is too little memory to read it, or to fuse the prompt's KV."""
    SLOW: Final = Reason(ReasonCode.SLOW, "slow")
    """Loading it would take longer than computing it."""
    TOO_SHORT: Final = Reason(ReasonCode.TOO_SHORT, "too short")
    """The prompt's reusable tokens are fewer than min_tokens."""
    UNSUPPORTED_MODEL: Final = Reason(ReasonCode.UNSUPPORTED_MODEL, "unsupported model")
    """This model's KV cannot be blended."""
    GUARD_STOPPED: Final = Reason(ReasonCode.GUARD_STOPPED, "stopped by the guard")
    """Blended answers diverged too far from full prefill."""
