"""Controlled English that can only be answered by attention across chunks.

Every document is about one person or company. Its first chunk names the subject; later chunks
say only "She", "his" or "The company". The documents of one prompt share type, pronoun and kinds
of fact and differ in values, so that a fact in a later chunk belongs to its subject only through
the chunk before it. `settings` adds what else prompts may depend on: another document, a revision,
an earlier question. All draws are deterministic in their seed.
"""

from cacheblend_rag.demo.corpus.documents import draw_documents
from cacheblend_rag.demo.corpus.generate import generate_collection, generate_prompts
from cacheblend_rag.demo.corpus.prompt import (
    BEGUN_FRAME,
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
from cacheblend_rag.demo.corpus.sentences import vocabulary
from cacheblend_rag.demo.corpus.settings import LEARNED_SETTINGS, SETTINGS
from cacheblend_rag.demo.corpus.shape import EVALUATION_SHAPE, CorpusShape
from cacheblend_rag.demo.corpus.subjects import FIRST_NAMES, held_out_names, names_and_values

__all__ = [
    "BEGUN_FRAME",
    "CHUNK_SEPARATOR",
    "DEFAULT_FRAME",
    "EVALUATION_SHAPE",
    "FIRST_NAMES",
    "INSTRUCTION",
    "LEARNED_SETTINGS",
    "OTHER_FRAMES",
    "SETTINGS",
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
    "names_and_values",
    "vocabulary",
]
