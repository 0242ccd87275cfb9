"""Checks of a request's BlendConfig and of an engine's settings, the same on every engine."""

from __future__ import annotations

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.settings import BlendConfig, LeadInConfig


def checked_config(config: BlendConfig) -> BlendConfig:
    """Return a request's config; its fields' ranges were checked when it was made.

    Raises ConfigError for an unknown selector or an unknown option of one.
    """
    make_selector(config.selector, config.selector_options)
    return config


def engine_settings(
    config: BlendConfig | None, lead_in: LeadInConfig | str | None
) -> tuple[BlendConfig, LeadInConfig]:
    """Return an engine's config and lead-in, defaults for None; raises ConfigError."""
    return checked_config(BlendConfig.of(config)), LeadInConfig.of(lead_in)
