"""Names that settings choose among: engines, lead-ins, precisions, profiles."""

from __future__ import annotations

from typing import Literal

LeadInKind = Literal["none", "bos", "instruction", "document"]
Precision = Literal["native", "fp8"]

DEFAULT_RATIO = 0.08
RATIO_BOUNDS = (0.05, 0.30)
PROTECTED_SHARE = 0.9
"""Share of a contextual chunk's prior whose tokens stay as stored if its document is absent."""
AUTO, EMBEDDED, VLLM = "auto", "transformers", "vllm"
PROFILES = ("quality", "balanced", "speed")
"""The packaged profiles."""
ENGINES = (AUTO, EMBEDDED, VLLM)
"""Engines that have a name; a server is given by its URL."""
