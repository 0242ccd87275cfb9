"""LeadInConfig: the text that an engine computes chunks after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from cacheblend_rag.settings.base import Flag, Must, Positive, Settings
from cacheblend_rag.settings.choices import LeadInKind


class LeadInConfig(Settings):
    """The text that an engine computes chunks after, fixed for its lifetime.

    Raises:
        ConfigError: when a field is out of range.
    """

    _noun: ClassVar[str] = "setting of a lead-in"

    kind: Annotated[LeadInKind, Must.choose(LeadInKind, name="lead_in")] = "document"
    """``none``, ``bos``, ``instruction`` or ``document`` (contextual chunk KV)."""
    document_window: Positive = 2048
    """Most tokens of its own document that a chunk is precomputed after."""
    unconfirmed_context: Flag = True
    """With the lead-in ``document``: whether a passage that a single document holds is answered for
    by its KV in that document although neither a hint nor the text before it in the prompt confirms
    that this document is meant. Off, its KV without document context is used, and stored too: for
    servers on which others store than those who ask."""
    split_special_tokens: Flag = True
    """Encode text in a chunk that looks like a special token as plain text, so that passages cannot
    imitate chat roles."""

    @classmethod
    def of(cls, value: LeadInConfig | Mapping[str, Any] | str | None) -> Self:
        """As for all settings; a string is the kind."""
        return cls(kind=value) if isinstance(value, str) else super().of(value)  # type: ignore[arg-type]
