"""CacheBlendPromptHelper: fills prompts with whole chunks, so that none is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.utilities.token_counting import TokenCounter

from cacheblend_rag import ChunkRegistry
from llama_index.llms.cacheblend.indexing import SEPARATOR
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.settings import checked_llm
from llama_index.llms.cacheblend.structured import schema_text

MESSAGE_TOKENS = 8


class CacheBlendPromptHelper(PromptHelper):
    """Packs and truncates at the ends of known chunks, counting with the model's own tokenizer.

    Other texts, and a chunk that does not fit even alone, are split as LlamaIndex splits them.

    Example:
        ```python
        Settings.prompt_helper = CacheBlendPromptHelper.from_llm(llm)
        ```

    """

    _registry: ChunkRegistry = PrivateAttr(default_factory=ChunkRegistry)

    @classmethod
    def from_llm(
        cls, llm: CacheBlendLLM, output_cls: type[BaseModel] | None = None
    ) -> CacheBlendPromptHelper:
        """Return a helper that knows ``llm``'s window, tokenizer and chunks.

        Args:
            llm: answers.
            output_cls: of structured answers; its schema takes room in their prompts.

        Raises:
            ConfigError: when ``llm`` is no CacheBlendLLM.
        """
        engine, metadata = checked_llm(llm).open(), llm.metadata
        schema = 0 if output_cls is None else len(engine.tokenize(schema_text(output_cls)))
        helper = cls(
            context_window=metadata.context_window,
            num_output=metadata.num_output + schema,
            chunk_overlap_ratio=0.0,
            chunk_size_limit=None,
        )
        helper._token_counter = _Counter(lambda text: list(engine.tokenize(text)))
        helper._registry = engine.registry
        return helper

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendPromptHelper"

    def get_text_splitter_given_prompt(self, *args: Any, **kwargs: Any) -> TokenTextSplitter:
        """Return a splitter by the room in a prompt, which keeps known chunks whole."""
        found = super().get_text_splitter_given_prompt(*args, **kwargs)
        splitter = _ChunkSplitter(chunk_size=found.chunk_size, chunk_overlap=found.chunk_overlap)
        splitter._tokenizer, splitter._registry = self._token_counter.tokenizer, self._registry
        return splitter

    def truncate(self, *args: Any, **kwargs: Any) -> list[str]:
        """Keep of each text as many whole chunks as fit into its share of the prompt."""
        return Context(super().truncate(*args, **kwargs))


class Context(list[str]):
    """Texts that read as text where a template prints them.

    ``simple_summarize`` gives a template the list that ``truncate`` returned. A plain list is
    printed with quotes and escaped line breaks, and then no chunk stands in the prompt verbatim.
    """

    def __str__(self) -> str:
        return SEPARATOR.join(self)


class _ChunkSplitter(TokenTextSplitter):
    """Splits a text that does not fit at the known chunks in it first."""

    _registry: ChunkRegistry = PrivateAttr()

    def _split(self, text: str, chunk_size: int) -> list[str]:
        if len(self._tokenizer(text)) <= chunk_size:
            return [text]
        cuts = [at for match in self._registry.find(text) for at in (match.start, match.end)]
        parts: list[str] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            parts += super()._split(text[start:end], chunk_size)
        return parts


class _Counter(TokenCounter):
    """Counts messages with the model's tokenizer, too, where LlamaIndex estimates them."""

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        return sum(self.get_string_tokens(m.content or "") + MESSAGE_TOKENS for m in messages)
