"""Query engines and retriever tools with every CacheBlend part in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field, model_validator
from llama_index.core.embeddings.utils import resolve_embed_model
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion.pipeline import remove_unstable_values
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import (
    DEFAULT_TEXT_QA_PROMPT_SEL,
    DEFAULT_TREE_SUMMARIZE_PROMPT_SEL,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import BaseNode, Document, TransformComponent
from llama_index.core.tools import RetrieverTool, ToolMetadata, ToolOutput
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import InstanceOf

from cacheblend_rag import CheckedOptions, ConfigError, PassageOrder
from llama_index.llms.cacheblend.indexing import CacheBlendPrecompute, CacheBlendVectorStore
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.prompt_helper import CacheBlendPromptHelper
from llama_index.llms.cacheblend.settings import CONTEXT_VARIABLES
from llama_index.postprocessor.cacheblend.postprocessor import CacheBlendPostprocessor

Source = Sequence[Document] | BaseIndex[Any]
OBJECT_MODES = (ResponseMode.REFINE, ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE)
"""The modes whose answer is an object of ``output_cls``; the others ignore it, or print it."""


class Passages(CheckedOptions):
    """Where an engine or a tool finds its passages: arguments of cacheblend_query_engine."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    llm: InstanceOf[CacheBlendLLM]
    source: InstanceOf[BaseIndex[Any]] | list[InstanceOf[Document]]
    transformations: list[InstanceOf[TransformComponent]] | None = None
    embed_model: Any = None
    vector_store: InstanceOf[BasePydanticVectorStore] | None = None
    similarity_top_k: int = Field(default=4, ge=1)
    node_postprocessors: list[InstanceOf[BaseNodePostprocessor]] = Field(default_factory=list)
    order: PassageOrder = PassageOrder.SCORE
    collection: str | None = None
    show_progress: bool = True

    @classmethod
    def of(cls, source: Source, llm: CacheBlendLLM | None, options: Mapping[str, Any]) -> Self:
        """Read the arguments; raises ConfigError for one that is unknown or of another kind.

        llm: by default that of Settings.
        """
        return cls(source=source, llm=Settings.llm if llm is None else llm, **options)

    def postprocessors(self) -> list[BaseNodePostprocessor]:
        """Return the postprocessors that were given, and the one that hints."""
        return [*self.node_postprocessors, CacheBlendPostprocessor(llm=self.llm, order=self.order)]

    def retriever(self, template: BasePromptTemplate | None = None) -> BaseRetriever:
        """Return a retriever over an index whose nodes' KV is stored.

        Unless the LLM has an instruction, or was opened before, the beginning of ``template``
        becomes its instruction: what KV is computed after.
        """
        index = self._index(template)
        return index.as_retriever(similarity_top_k=self.similarity_top_k)

    def _index(self, template: BasePromptTemplate | None) -> BaseIndex[Any]:
        is_index = isinstance(self.source, BaseIndex)
        # First, since it may be missing.
        embed_model = (
            None if is_index else resolve_embed_model(self.embed_model or Settings.embed_model)
        )
        if template is not None and self.llm.instruction is None and not self.llm.is_open:
            self.llm.instruction = self.llm.resolve_instruction(template)
        steps = list(self.transformations or Settings.transformations)
        collection = self.collection
        if collection is None:
            collection = "" if is_index else _name_of(steps)
        precompute = CacheBlendPrecompute.from_llm(
            self.llm, collection=collection, show_progress=self.show_progress
        )
        if isinstance(self.source, BaseIndex):
            precompute(_nodes_of(self.source))
            return self.source
        vectors = self.vector_store or SimpleVectorStore()
        store = CacheBlendVectorStore(vectors, self.llm, collection)
        return VectorStoreIndex.from_documents(
            self.source,
            storage_context=StorageContext.from_defaults(vector_store=store),
            transformations=[*steps, precompute],
            embed_model=embed_model,
            show_progress=self.show_progress,
        )


def _name_of(transformations: Sequence[TransformComponent]) -> str:
    """Return a name for documents that are cut so, the same in every process."""
    settings = remove_unstable_values(str([step.to_dict() for step in transformations]))
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def _nodes_of(index: BaseIndex[Any]) -> list[BaseNode]:
    """Return an index's nodes, from its document store or, where that is empty, its vectors'."""
    nodes = [node for node in index.docstore.docs.values() if not isinstance(node, Document)]
    if nodes or not isinstance(index, VectorStoreIndex):
        return nodes
    try:
        return list(index.vector_store.get_nodes())
    except NotImplementedError:
        store = type(index.vector_store).__name__
        raise ConfigError(
            f"{store} cannot list its nodes: run CacheBlendPrecompute on them"
        ) from None


class QueryEngineOptions(Passages):
    """Arguments of cacheblend_query_engine alone."""

    text_qa_template: InstanceOf[BasePromptTemplate] | None = None
    summary_template: InstanceOf[BasePromptTemplate] | None = None
    response_mode: ResponseMode = ResponseMode.COMPACT
    output_cls: type[BaseModel] | None = None
    streaming: bool = False
    use_async: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name in ("text_qa_template", "summary_template"):
            taken = () if getattr(self, name) is None else getattr(self, name).template_vars
            if taken and not set(CONTEXT_VARIABLES) & set(taken):
                raise ConfigError(f"{name} must take 'context_str', not only {taken}")
        if self.output_cls is not None and self.response_mode not in OBJECT_MODES:
            modes = ", ".join(one.value for one in OBJECT_MODES)
            raise ConfigError(f"output_cls needs a response_mode of {modes}")
        if self.output_cls is not None and self.streaming:
            raise ConfigError("output_cls: an object is not streamed: leave out streaming")
        return self


def cacheblend_query_engine(
    source: Source, llm: CacheBlendLLM | None = None, **options: Any
) -> RetrieverQueryEngine:
    """Return a query engine over ``source`` whose retrieved chunks are reused, not read again.

    Args:
        source: documents, indexed here in a vector store that evicts the KV of what is deleted from
            it, or an index there is, whose nodes are precomputed as far as they are not stored yet.
        llm: by default ``Settings.llm``. Unless it has an instruction, or was opened before, chunks
            are precomputed after the beginning of the template.
        **options: ``text_qa_template``, ``summary_template``, ``response_mode``, ``streaming`` and
            ``use_async`` are as for any synthesizer. ``output_cls``: a pydantic class whose object
            is the answer (``response.response``), by constrained decoding. In the modes refine,
            compact and tree_summarize, not streamed.
            cacheblend_chat_engine and cacheblend_retriever_tool take the following, too:
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
    given = QueryEngineOptions.of(source, llm, options)
    summarizes = given.response_mode == ResponseMode.TREE_SUMMARIZE
    own = given.summary_template if summarizes else given.text_qa_template
    default = DEFAULT_TREE_SUMMARIZE_PROMPT_SEL if summarizes else DEFAULT_TEXT_QA_PROMPT_SEL
    retriever = given.retriever(own or default)  # may give the LLM its instruction: first
    synthesizer = get_response_synthesizer(
        llm=given.llm,
        prompt_helper=CacheBlendPromptHelper.from_llm(given.llm, given.output_cls),
        text_qa_template=given.text_qa_template,
        summary_template=given.summary_template,
        response_mode=given.response_mode,
        output_cls=given.output_cls,
        streaming=given.streaming,
        use_async=given.use_async,
    )
    return RetrieverQueryEngine(
        retriever=retriever,
        response_synthesizer=synthesizer,
        node_postprocessors=given.postprocessors(),
    )


def cacheblend_retriever_tool(
    source: Source,
    llm: CacheBlendLLM | None = None,
    *,
    name: str = "search",
    description: str = "Finds the passages that tell most about a question.",
    **options: Any,
) -> RetrieverTool:
    """Return a tool whose results hold passages word for word, so that an agent reuses their KV.

    Args:
        source: documents or an index, as for cacheblend_query_engine.
        llm: the agent's; by default ``Settings.llm``.
        name: by which the model calls the tool.
        description: what the model is told of it: say what the passages are about.
        **options: those of cacheblend_query_engine.

    Raises:
        ConfigError: before a model is loaded, for an argument of another kind.
    """
    passages = Passages.of(source, llm, options)
    return _PassageTool(
        passages.retriever(),
        ToolMetadata(name=name, description=description),
        passages.postprocessors(),
    )


class _PassageTool(RetrieverTool):
    """A retriever tool that searches for what it is asked, without the arguments' names."""

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return super().call(*args, *kwargs.values())

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return await super().acall(*args, *kwargs.values())
