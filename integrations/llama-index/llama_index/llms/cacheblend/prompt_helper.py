"""CacheBlendPromptHelper: fills prompts with whole chunks, so that none is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS
from llama_index.core.indices.prompt_helper import (
    DEFAULT_CHUNK_OVERLAP_RATIO,
    DEFAULT_PADDING,
    PromptHelper,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.utilities.token_counting import TokenCounter

from cacheblend_rag import ChunkRegistry, ConfigError
from llama_index.llms.cacheblend.documents import SEPARATOR
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.structured import schema_text

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

MESSAGE_TOKENS = 8


class CacheBlendPromptHelper(PromptHelper):
    """Packs and truncates at chunk boundaries, counting with the model's own tokenizer.

    A chunk that does not fit even alone is split as LlamaIndex splits it; its parts are computed
    as ordinary text.

    Args:
        registry: the chunks at whose boundaries texts are cut; the other arguments are those of
            PromptHelper.

    Example:
        ```python
        Settings.prompt_helper = CacheBlendPromptHelper.from_llm(llm)
        ```

    """

    _registry: ChunkRegistry = PrivateAttr()

    def __init__(
        self,
        *,
        context_window: int = DEFAULT_CONTEXT_WINDOW,
        num_output: int = DEFAULT_NUM_OUTPUTS,
        chunk_overlap_ratio: float = DEFAULT_CHUNK_OVERLAP_RATIO,
        chunk_size_limit: int | None = None,
        tokenizer: Callable[[str], list[Any]] | None = None,
        separator: str = " ",
        registry: ChunkRegistry | None = None,
    ) -> None:
        super().__init__(
            context_window, num_output, chunk_overlap_ratio, chunk_size_limit, tokenizer, separator
        )
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
        if not isinstance(llm, CacheBlendLLM):
            raise ConfigError(f"llm is a {type(llm).__name__}: give a CacheBlendLLM")
        engine, metadata = llm.open(), llm.metadata
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
        """Fill as few prompts as whole chunks allow.

        Args:
            prompt: the template that the texts go into.
            text_chunks: texts, which may hold chunks.
            padding: tokens to leave free in each prompt.
            llm: the model that is asked; its system prompt takes room.
            tools: what the model may call; their descriptions take room.

        Returns:
            A text a prompt.

        Raises:
            ValueError: where nothing fits.
        """
        splitter = self.get_text_splitter_given_prompt(prompt, 1, padding, llm=llm, tools=tools)
        room, gap = splitter.chunk_size, self._tokens(SEPARATOR)
        packs: list[list[str]] = []
        left = 0
        for text in text_chunks:
            for piece in self._pieces(text.strip(), room):
                tokens = self._tokens(piece)
                parts = [piece] if tokens <= room else splitter.split_text(piece)
                for part in parts:
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
        """Keep of each text as many whole chunks as fit into its share of the prompt.

        Args:
            prompt: as for repack.
            text_chunks: as for repack.
            padding: as for repack.
            llm: as for repack.
            tools: as for repack.

        Returns:
            What is kept of each text.
        """
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
        if not text:
            return []
        if self._tokens(text) <= room:
            return [text]
        cuts = [0]
        for match in self._registry.find(text):
            cuts += [match.start, match.end]
        cuts.append(len(text))
        pieces = [text[start:end].strip() for start, end in pairwise(cuts)]
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
