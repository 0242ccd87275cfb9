"""LeadInConfig, which text a chunk's KV is conditioned on; profiles, named sets of settings."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, PlainSerializer

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Positive, Settings
from cacheblend_rag.settings.options import PROFILES, LeadInKind
from cacheblend_rag.settings.request import BlendConfig

VARIABLE = "CACHEBLEND_PROFILE"
"""Names the profile, or its file, where no ``profile`` is given."""
FOLDER = Path(__file__).parent / "profiles"


class LeadInConfig(Settings):
    """The text that an engine computes chunks after, fixed for its lifetime."""

    _noun: ClassVar[str] = "setting of a lead-in"

    kind: Annotated[LeadInKind, Field(title="lead_in")] = "document"
    """``none``, ``bos``, ``instruction`` or ``document`` (contextual chunk KV)."""
    document_window: Positive = 2048
    """Most tokens of its own document that a chunk is precomputed after."""
    unconfirmed_context: bool = True
    """With the lead-in ``document``: whether a passage that a single document holds is answered for
    by its KV in that document although neither a hint nor the text before it in the prompt confirms
    that this document is meant. Off, its KV without document context is used, and stored too: for
    servers on which others store than those who ask."""

    @classmethod
    def of(cls, value: LeadInConfig | Mapping[str, Any] | str | None) -> Self:
        """Return the settings of a mapping, or of a string, which names the kind alone."""
        return cls(kind=value) if isinstance(value, str) else super().of(value)  # type: ignore[arg-type]


BlendOption = Annotated[BlendConfig, BeforeValidator(BlendConfig.of)]
"""A BlendConfig, or a mapping of its fields."""
LeadInOption = Annotated[LeadInConfig, BeforeValidator(LeadInConfig.of)]
"""A LeadInConfig, a mapping of its fields, or its kind."""


class Profile(Settings):
    """Settings under one name; `tune` writes one.

    A setting that is given beside a profile overrides the profile's, which overrides the default.
    """

    _noun: ClassVar[str] = "entry of a profile"

    name: Annotated[str, Field(min_length=1)] = "own"
    """What reports call it."""
    model: str = ""
    """The public name of the model that it was tuned on; "" suits any."""
    blend: BlendOption = Field(default_factory=BlendConfig)
    """How KV is blended; only the fields that are given count."""
    lead_in: LeadInOption = Field(default_factory=LeadInConfig)
    """The text that chunks are computed after; only the fields that are given count."""
    measured: Annotated[dict[str, Any], Field(strict=False)] = Field(default_factory=dict)
    """What was measured with these settings, and where: for readers, no program uses it."""

    @classmethod
    def of(cls, value: Profile | Mapping[str, Any] | str | Path | None) -> Self:
        """As for all settings; a text or a path is the name of a packaged profile, or a file."""
        return cls.load(value) if isinstance(value, str | Path) else super().of(value)  # type: ignore[arg-type]

    @classmethod
    def chosen(cls, value: Profile | Mapping[str, Any] | str | Path | None) -> Self | None:
        """Return a given profile, or the one that the environment names, or None."""
        found = value or os.environ.get(VARIABLE)
        return cls.of(found) if found else None

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Return a packaged profile, or the one in a TOML file.

        Raises:
            ConfigError: when there is none, or it is no profile.
        """
        path = FOLDER / f"{name}.toml" if str(name) in PROFILES else Path(name).expanduser()
        try:
            return cls(**tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            why = f" must be {', '.join(PROFILES)} or a TOML file: {error.strerror}"
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            why = f" is not TOML: {error}"
        except ConfigError as error:
            why = f": {error}"
        raise ConfigError(f"profile={str(name)!r}{why}")

    def save(self, path: Path) -> None:
        """Write it as TOML; ``load`` reads it.

        Raises:
            ConfigError: when the file cannot be written.
        """
        import tomli_w

        try:
            path.write_text(tomli_w.dumps(self.to_dict()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; of the settings, those that are given and not None."""
        plain = self.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        return {name: value for name, value in plain.items() if value}

    def blended(self, config: BlendConfig) -> BlendConfig:
        """Return a request's settings over the profile's."""
        return self.blend.with_changes(**config.given())

    def led_in(self, lead_in: LeadInConfig) -> LeadInConfig:
        """Return the settings of a lead-in over the profile's."""
        return self.lead_in.with_changes(**lead_in.given())


ProfileOption = Annotated[Profile | None, PlainSerializer(lambda one: one and one.to_dict())]
"""A profile or none; of its settings, only the given ones are serialized."""
