"""Names that settings choose among: engines, lead-ins, precisions, presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

LeadInKind = Literal["none", "bos", "instruction", "document"]
Preset = Literal["quality", "balanced", "speed"]
Precision = Literal["native", "fp8", "int8"]
ChunkBudget = Literal["none", "equal", "mass"]

PRESET_RATIOS: Mapping[str, float] = {"quality": 0.25, "balanced": 0.16, "speed": 0.10}
RATIO_BOUNDS = (0.05, 0.30)
PROTECTED_SHARE = 0.9
"""Share of a contextual chunk's prior whose tokens stay as stored if its document is absent."""
AUTO, EMBEDDED, VLLM = "auto", "transformers", "vllm"
ENGINES = (AUTO, EMBEDDED, VLLM)
"""Engines that have a name; a server is given by its URL."""
