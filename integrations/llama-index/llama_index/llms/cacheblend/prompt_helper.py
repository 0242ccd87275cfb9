"""CacheBlendPromptHelper: fills prompts with whole chunks, so that none is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.utilities.token_counting import TokenCounter

from cacheblend_rag import ChunkRegistry
from llama_index.llms.cacheblend.documents import SEPARATOR
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.settings import checked_llm
from llama_index.llms.cacheblend.structured import schema_text

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

MESSAGE_TOKENS = 8


class CacheBlendPromptHelper(PromptHelper):
    """Packs and truncates at chunk boundaries, counting with the model's own tokenizer.

    A chunk that does not fit even alone is split as LlamaIndex splits it; its parts are computed
    as ordinary text.

    Args:
        registry: the chunks at whose boundaries texts are cut.
        tokenizer: counts tokens, as in PromptHelper.
        fields: PromptHelper's others.

    Example:
        ```python
        Settings.prompt_helper = CacheBlendPromptHelper.from_llm(llm)
        ```

    """

    _registry: ChunkRegistry = PrivateAttr()

    def __init__(
        self,
        *,
        registry: ChunkRegistry | None = None,
        tokenizer: Callable[[str], list[Any]] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(tokenizer=tokenizer, **fields)
        self._token_counter = _Counter(tokenizer)
        self._registry = ChunkRegistry() if registry is None else registry

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
        return cls(
            context_window=metadata.context_window,
            num_output=metadata.num_output + schema,
            tokenizer=lambda text: list(engine.tokenize(text)),
            registry=engine.registry,
        )

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendPromptHelper"

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Fill as few prompts as whole chunks allow."""
        splitter = self.get_text_splitter_given_prompt(prompt, 1, padding, llm=llm, tools=tools)
        room, gap = splitter.chunk_size, self._tokens(SEPARATOR)
        packs: list[list[str]] = []
        left = 0
        for text in text_chunks:
            for piece in self._pieces(text.strip(), room):
                is_long = self._tokens(piece) > room
                for part in splitter.split_text(piece) if is_long else [piece]:
                    tokens = self._tokens(part)
                    if packs and tokens + gap <= left:
                        packs[-1].append(part)
                        left -= tokens + gap
                    else:
                        packs.append([part])
                        left = room - tokens
        return [SEPARATOR.join(pack) for pack in packs]

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Keep of each text as many whole chunks as fit into its share of the prompt."""
        if not text_chunks:
            return []
        splitter = self.get_text_splitter_given_prompt(
            prompt, len(text_chunks), padding, llm=llm, tools=tools
        )
        return Context(
            self._whole_head(text, splitter.chunk_size) or splitter.split_text(text)[0]
            for text in text_chunks
        )

    def _pieces(self, text: str, room: int) -> list[str]:
        """Cut a text that does not fit at the known chunks in it; keep one that fits."""
        matches = self._registry.find(text) if self._tokens(text) > room else []
        cuts = [at for match in matches for at in (match.start, match.end)]
        pieces = (text[start:end].strip() for start, end in pairwise([0, *cuts, len(text)]))
        return [piece for piece in pieces if piece]

    def _whole_head(self, text: str, room: int) -> str:
        """Return the text up to the last chunk end that fits; empty when there is none."""
        if self._tokens(text) <= room:
            return text
        kept, used, done = 0, 0, 0
        for match in self._registry.find(text):
            used += self._tokens(text[done : match.start]) + self._tokens(match.chunk.text)
            done = match.end
            if used > room:
                break
            kept = match.end
        return text[:kept]

    def _tokens(self, text: str) -> int:
        return self._token_counter.get_string_tokens(text)


class Context(list[str]):
    """Texts that read as text where a template prints them.

    ``simple_summarize`` gives a template the list that ``truncate`` returned. A plain list is
    printed with quotes and escaped line breaks, and then no chunk stands in the prompt verbatim.
    """

    def __str__(self) -> str:
        return SEPARATOR.join(self)


class _Counter(TokenCounter):
    """Counts messages with the model's tokenizer, too, where LlamaIndex estimates them."""

    def estimate_tokens_in_messages(self, messages: list[ChatMessage]) -> int:
        return sum(self.get_string_tokens(m.content or "") + MESSAGE_TOKENS for m in messages)
