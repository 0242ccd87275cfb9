"""The blend pass: re-rotation, row selection, and layers run on the chosen rows only."""

from cacheblend_rag.blend.fused import FusedKV, RingKV
from cacheblend_rag.blend.passes import BlendPass
from cacheblend_rag.blend.schedule import Schedule, plan_schedule
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack

__all__ = [
    "AttentionCall",
    "BlendPass",
    "DecoderStack",
    "FusedKV",
    "RingKV",
    "Schedule",
    "plan_schedule",
]
