"""A model of 1.1M parameters (`TOY`), and the corpus that it was trained on.

The corpus is controlled English that can only be answered by attention across chunks.

Every document is about one person or company. Its first chunk names the subject; later chunks
say only "She", "his" or "The company". The documents of one prompt share type, pronoun and kinds
of fact and differ in values, so that a fact in a later chunk belongs to its subject only through
the chunk before it. `settings` adds what else prompts may depend on: another document, a revision,
an earlier question. All draws are deterministic in their seed.
"""

from pathlib import Path

from .documents import draw_documents
from .generate import generate_collection, generate_prompts
from .prompt import (
    CHUNK_SEPARATOR,
    DEFAULT_FRAME,
    INSTRUCTION,
    OTHER_FRAMES,
    UNKNOWN,
    DemoDocument,
    DemoPrompt,
    DemoQuestion,
    PromptFrame,
)
from .settings import LEARNED_SETTINGS, SETTINGS
from .shape import EVALUATION_SHAPE, CorpusShape
from .subjects import FIRST_NAMES, held_out_names

TOY = str(Path(__file__).parent)
"""The model, a folder in hub format; reports and servers name it ``toy``."""

__all__ = [
    "CHUNK_SEPARATOR",
    "DEFAULT_FRAME",
    "EVALUATION_SHAPE",
    "FIRST_NAMES",
    "INSTRUCTION",
    "LEARNED_SETTINGS",
    "OTHER_FRAMES",
    "SETTINGS",
    "TOY",
    "UNKNOWN",
    "CorpusShape",
    "DemoDocument",
    "DemoPrompt",
    "DemoQuestion",
    "PromptFrame",
    "draw_documents",
    "generate_collection",
    "generate_prompts",
    "held_out_names",
]
