"""BlendConfig: every knob of the blend pass, validated, with three presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from cacheblend_rag.arguments import Arguments
from cacheblend_rag.errors import ConfigError

LeadIn = Literal["none", "bos", "instruction", "document"]
Preset = Literal["quality", "balanced", "speed"]

PRESET_RATIOS: Mapping[str, float] = {"quality": 0.25, "balanced": 0.16, "speed": 0.10}


@dataclass(frozen=True)
class BlendConfig:
    """How cached chunk KV is fused at question time.

    recompute_ratio: share of chunk tokens recomputed, 0 (plain reuse) to 1 (ordinary prefill).
    check_layers: layers at which a selector that needs fresh KV compares it with cached KV;
        ignored by selectors that choose rows before layer 0.
    recompute_ratios: one ratio a check layer, never rising; None uses recompute_ratio for all.
    selector: name of the rule that ranks tokens (see ``cacheblend_rag.blend.selectors``).
    selector_options: the selector's own fields, such as ``{"deviation": "k"}`` for ``hkvd``.
    min_tokens: prompts with fewer reusable chunk tokens are served by ordinary prefill.
    lead_in: what chunks are precomputed behind: ``none``, ``bos``, ``instruction``, ``document``.
    document_window: tokens of its own document a chunk is precomputed behind, at most.
    split_special_tokens: what looks like a special token in a chunk is encoded as the text that it
        is, so that passages cannot speak as the system. An engine's, like the lead-in.
    protect_context: never recompute tokens of a contextual chunk whose own document context is
        absent from the prompt, since fresh KV would forget it. Off at ratio 1.

    Raises ConfigError on construction when a field is out of range.
    """

    recompute_ratio: float = PRESET_RATIOS["balanced"]
    check_layers: tuple[int, ...] = (1,)
    recompute_ratios: tuple[float, ...] | None = None
    selector: str = "hkvd"
    selector_options: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 256
    lead_in: LeadIn = "document"
    document_window: int = 2048
    protect_context: bool = True
    split_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "check_layers", _list("check_layers", self.check_layers))
        if self.recompute_ratios is not None:
            ratios = _list("recompute_ratios", self.recompute_ratios)
            object.__setattr__(self, "recompute_ratios", ratios)
        object.__setattr__(self, "selector_options", _options(self.selector_options))
        _check_ratio("recompute_ratio", self.recompute_ratio)
        _check_layers(self.check_layers)
        if self.recompute_ratios is not None:
            _check_schedule(self.recompute_ratios, self.check_layers)
        if not isinstance(self.selector, str) or not self.selector:
            raise ConfigError(f"selector={self.selector!r} must be a selector's name")
        _check_int("min_tokens", self.min_tokens, 0)
        _check_int("document_window", self.document_window, 1)
        _check_flag("protect_context", self.protect_context)
        _check_flag("split_special_tokens", self.split_special_tokens)
        if self.lead_in not in get_args(LeadIn):
            raise ConfigError(
                f"lead_in={self.lead_in!r} must be one of {', '.join(get_args(LeadIn))}"
            )

    @classmethod
    def preset(cls, name: Preset, **overrides: Any) -> BlendConfig:
        """Return the preset ``quality`` (0.25), ``balanced`` (0.16) or ``speed`` (0.10)."""
        if name not in PRESET_RATIOS:
            raise ConfigError(f"preset={name!r} must be one of {', '.join(PRESET_RATIOS)}")
        return cls(**{"recompute_ratio": PRESET_RATIOS[name], **overrides})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlendConfig:
        """Build a config from plain values (JSON, TOML); unknown names raise ConfigError."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"settings are a {type(values).__name__}: give names with values")
        return cls(**Arguments("setting", frozenset(f.name for f in fields(cls))).read(values))

    def with_changes(self, **changes: Any) -> BlendConfig:
        """Return a copy with some fields replaced, validated again."""
        return replace(self, **changes)

    def ratio_at(self, check: int) -> float:
        """Recompute ratio in force after the ``check``-th check layer."""
        return (
            self.recompute_ratio if self.recompute_ratios is None else self.recompute_ratios[check]
        )


def _list(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r:.100} must be a list of numbers")
    return tuple(value)


def _options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"selector_options={value!r:.100} must be an object of named values")
    return dict(value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r:.100} must be true or false")


def _check_ratio(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={value!r} must be a number from 0 to 1")


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {low}")


def _check_layers(layers: tuple[int, ...]) -> None:
    if not layers:
        raise ConfigError("check_layers=() must name at least one layer")
    for layer in layers:
        _check_int("check_layers", layer, 0)
    if any(b <= a for a, b in pairwise(layers)):
        raise ConfigError(f"check_layers={layers} must rise strictly")


def _check_schedule(ratios: tuple[float, ...], layers: tuple[int, ...]) -> None:
    if len(ratios) != len(layers):
        raise ConfigError(
            f"recompute_ratios={ratios} must hold one ratio for each of check_layers={layers}"
        )
    for ratio in ratios:
        _check_ratio("recompute_ratios", ratio)
    if any(b > a for a, b in pairwise(ratios)):
        raise ConfigError(f"recompute_ratios={ratios} must not rise: rows are only ever dropped")
