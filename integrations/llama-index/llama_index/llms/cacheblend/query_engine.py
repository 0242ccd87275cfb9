"""cacheblend_query_engine: a query engine with every CacheBlend part in its place."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import (
    DEFAULT_TEXT_QA_PROMPT_SEL,
    DEFAULT_TREE_SUMMARIZE_PROMPT_SEL,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from pydantic import InstanceOf

from cacheblend_rag import CheckedOptions, ConfigError
from llama_index.llms.cacheblend.indexing import Passages, Source
from llama_index.llms.cacheblend.instruction import CONTEXT_VARIABLES
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.prompt_helper import CacheBlendPromptHelper

OBJECT_MODES = (ResponseMode.REFINE, ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE)
"""The modes whose answer is an object of ``output_cls``; the others ignore it, or print it."""


def cacheblend_query_engine(
    source: Source,
    llm: CacheBlendLLM | None = None,
    *,
    text_qa_template: BasePromptTemplate | None = None,
    summary_template: BasePromptTemplate | None = None,
    response_mode: ResponseMode = ResponseMode.COMPACT,
    output_cls: type[BaseModel] | None = None,
    streaming: bool = False,
    use_async: bool = False,
    **options: Any,
) -> RetrieverQueryEngine:
    """Return a query engine over ``source`` whose retrieved chunks are reused, not read again.

    Args:
        source: documents, indexed here in a vector store that evicts the KV of what is deleted from
            it, or an index there is, whose nodes are precomputed as far as they are not stored yet.
        llm: by default ``Settings.llm``. Unless it has an instruction, or was opened before, chunks
            are precomputed after the beginning of the template.
        text_qa_template: by default LlamaIndex's own.
        summary_template: by default LlamaIndex's own.
        response_mode: as for any synthesizer.
        output_cls: a pydantic class whose object is the answer (``response.response``), by
            constrained decoding. In the modes refine, compact and tree_summarize, not streamed.
        streaming: as for any synthesizer.
        use_async: as for any synthesizer.
        **options: what cacheblend_chat_engine and cacheblend_retriever_tool take, too:
            ``transformations``, what turns documents into nodes, and ``embed_model``; by default
            those of ``Settings``. ``vector_store``, of documents; by default this process' memory.
            ``similarity_top_k``, how many nodes are retrieved: 4. ``node_postprocessors``, which
            run before the one that hints. ``order``: as in CacheBlendPostprocessor.
            ``collection``: as in CacheBlendPrecompute; by default documents that are cut by other
            transformations are in another one, so that two indexes over the same documents keep
            their chunks. ``show_progress``: whether bars are shown.

    Raises:
        ConfigError: before a model is loaded, for an argument of another kind.
    """
    passages = Passages.of(source, llm, options)
    given = _Given(
        text_qa_template=text_qa_template,
        summary_template=summary_template,
        response_mode=response_mode,
        output_cls=output_cls,
    )
    given.check(streaming=streaming)
    summarizes = response_mode == ResponseMode.TREE_SUMMARIZE
    own = summary_template if summarizes else text_qa_template
    default = DEFAULT_TREE_SUMMARIZE_PROMPT_SEL if summarizes else DEFAULT_TEXT_QA_PROMPT_SEL
    retriever = passages.retriever(own or default)  # may give the LLM its instruction: first
    synthesizer = get_response_synthesizer(
        llm=passages.llm,
        prompt_helper=CacheBlendPromptHelper.from_llm(passages.llm, output_cls),
        text_qa_template=text_qa_template,
        summary_template=summary_template,
        response_mode=response_mode,
        output_cls=output_cls,
        streaming=streaming,
        use_async=use_async,
    )
    return RetrieverQueryEngine(
        retriever=retriever,
        response_synthesizer=synthesizer,
        node_postprocessors=passages.postprocessors(),
    )


class _Given(CheckedOptions):
    """Validates the arguments of ``cacheblend_query_engine``."""

    text_qa_template: InstanceOf[BasePromptTemplate] | None
    summary_template: InstanceOf[BasePromptTemplate] | None
    response_mode: ResponseMode
    output_cls: type[BaseModel] | None

    def check(self, *, streaming: bool) -> None:
        """Raise ConfigError for arguments that do not go together."""
        for name in ("text_qa_template", "summary_template"):
            taken = () if getattr(self, name) is None else getattr(self, name).template_vars
            if taken and not set(CONTEXT_VARIABLES) & set(taken):
                raise ConfigError(f"{name} must take 'context_str', not only {taken}")
        if self.output_cls is not None and self.response_mode not in OBJECT_MODES:
            modes = ", ".join(one.value for one in OBJECT_MODES)
            raise ConfigError(f"output_cls needs a response_mode of {modes}")
        if self.output_cls is not None and streaming:
            raise ConfigError("output_cls: an object is not streamed: leave out streaming")
