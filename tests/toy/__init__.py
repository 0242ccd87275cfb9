"""A model of 1.1M parameters (`TOY`), and a part of the corpus that it was trained on.

The corpus is controlled English that can only be answered by attention across chunks.

Every document is about one person or company. Its first chunk names the subject; later chunks
say only "She", "his" or "The company". The documents of one prompt share type, pronoun and kinds
of fact and differ in values, so that a fact in a later chunk belongs to its subject only through
the chunk before it. Subjects in ``corpus.json`` are among those that training never drew.
"""

from pathlib import Path

from .corpus import (
    CHUNK_SEPARATOR,
    DEFAULT_FRAME,
    INSTRUCTION,
    OTHER_HEAD,
    DemoDocument,
    DemoPrompt,
    DemoQuestion,
    PromptFrame,
    generate_collection,
    generate_prompts,
)

TOY = str(Path(__file__).parent)
"""The model, a folder in hub format; reports and servers name it ``toy``."""

__all__ = [
    "CHUNK_SEPARATOR",
    "DEFAULT_FRAME",
    "INSTRUCTION",
    "OTHER_HEAD",
    "TOY",
    "DemoDocument",
    "DemoPrompt",
    "DemoQuestion",
    "PromptFrame",
    "generate_collection",
    "generate_prompts",
]
