"""cacheblend_query_engine: a query engine with every CacheBlend part in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.embeddings.utils import EmbedType, resolve_embed_model
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
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from cacheblend_rag import ConfigError, PassageOrder
from llama_index.llms.cacheblend.documents import checked_nodes
from llama_index.llms.cacheblend.instruction import CONTEXT_VARIABLES
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.precompute import CacheBlendPrecompute, Variant
from llama_index.llms.cacheblend.prompt_helper import CacheBlendPromptHelper
from llama_index.llms.cacheblend.vector_store import CacheBlendVectorStore
from llama_index.postprocessor.cacheblend.postprocessor import CacheBlendPostprocessor


def cacheblend_query_engine(
    source: Sequence[Document] | BaseIndex[Any],
    llm: CacheBlendLLM | None = None,
    *,
    transformations: Sequence[TransformComponent] | None = None,
    embed_model: EmbedType | None = None,
    vector_store: BasePydanticVectorStore | None = None,
    text_qa_template: BasePromptTemplate | None = None,
    summary_template: BasePromptTemplate | None = None,
    response_mode: ResponseMode = ResponseMode.COMPACT,
    similarity_top_k: int = 4,
    node_postprocessors: Sequence[BaseNodePostprocessor] = (),
    order: PassageOrder | str = PassageOrder.SCORE,
    variants: tuple[Variant, ...] | None = None,
    collection: str | None = None,
    streaming: bool = False,
    use_async: bool = False,
    show_progress: bool = True,
) -> RetrieverQueryEngine:
    """Return a query engine over ``source`` whose retrieved chunks are reused, not read again.

    Args:
        source: documents, indexed here in a vector store that evicts the KV of what is deleted from
            it, or an index there is, whose nodes are precomputed as far as they are not stored yet.
        llm: by default ``Settings.llm``. Unless it has an instruction, or was opened before, chunks
            are precomputed after the beginning of the template.
        transformations: what turns documents into nodes; by default those of ``Settings``.
        embed_model: how documents are embedded; by default that of ``Settings``.
        vector_store: keeps the vectors of documents; by default this process' memory.
        text_qa_template: by default LlamaIndex's own.
        summary_template: by default LlamaIndex's own.
        response_mode: as for any synthesizer.
        similarity_top_k: how many nodes are retrieved.
        node_postprocessors: run before the one that hints.
        order: as in CacheBlendPostprocessor.
        variants: as in CacheBlendPrecompute.
        collection: as in CacheBlendPrecompute; by default documents that are cut by other
            transformations are in another one, so that two indexes over the same documents keep
            their chunks.
        streaming: as for any synthesizer.
        use_async: as for any synthesizer.
        show_progress: whether bars are shown.

    Raises:
        ConfigError: before a model is loaded, for an argument of another kind.
    """
    llm = _blending(llm)
    if not isinstance(source, BaseIndex):
        source = checked_nodes(source, "documents")
    _check_choice("order", order, list(PassageOrder))
    _check_choice("response_mode", response_mode, [mode.value for mode in ResponseMode])
    _check_count("similarity_top_k", similarity_top_k)
    _check_template("text_qa_template", text_qa_template)
    _check_template("summary_template", summary_template)
    _check_parts("transformations", transformations or (), TransformComponent)
    _check_parts("node_postprocessors", node_postprocessors, BaseNodePostprocessor)
    embed_model = resolve_embed_model(embed_model) if embed_model else Settings.embed_model
    summarizes = response_mode == ResponseMode.TREE_SUMMARIZE
    if llm.instruction is None and not llm.is_open:
        own = summary_template if summarizes else text_qa_template
        default = DEFAULT_TREE_SUMMARIZE_PROMPT_SEL if summarizes else DEFAULT_TEXT_QA_PROMPT_SEL
        llm.instruction = llm.resolve_instruction(own or default)
    steps = list(transformations or Settings.transformations)
    if collection is None:
        collection = "" if isinstance(source, BaseIndex) else _name_of(steps)
    precompute = CacheBlendPrecompute.from_llm(
        llm, variants=variants, collection=collection, show_progress=show_progress
    )
    if isinstance(source, BaseIndex):
        precompute(_nodes_of(source))
        index = source
    else:
        store = CacheBlendVectorStore(vector_store or SimpleVectorStore(), llm, collection)
        index = VectorStoreIndex.from_documents(
            source,
            storage_context=StorageContext.from_defaults(vector_store=store),
            transformations=[*steps, precompute],
            embed_model=embed_model,
            show_progress=show_progress,
        )
    synthesizer = get_response_synthesizer(
        llm=llm,
        prompt_helper=CacheBlendPromptHelper.from_llm(llm),
        text_qa_template=text_qa_template,
        summary_template=summary_template,
        response_mode=response_mode,
        streaming=streaming,
        use_async=use_async,
    )
    hinting = CacheBlendPostprocessor(llm=llm, order=PassageOrder(order))
    return RetrieverQueryEngine(
        retriever=index.as_retriever(similarity_top_k=similarity_top_k),
        response_synthesizer=synthesizer,
        node_postprocessors=[*node_postprocessors, hinting],
    )


def _name_of(transformations: Sequence[TransformComponent]) -> str:
    """Return a name for documents that are cut so, the same in every process."""
    settings = remove_unstable_values(str([step.to_dict() for step in transformations]))
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def _blending(llm: CacheBlendLLM | None) -> CacheBlendLLM:
    chosen = Settings.llm if llm is None else llm
    if not isinstance(chosen, CacheBlendLLM):
        raise ConfigError(f"llm is a {type(chosen).__name__}: give a CacheBlendLLM")
    return chosen


def _check_choice(name: str, given: Any, choices: Sequence[str]) -> None:
    if given not in choices:
        raise ConfigError(f"{name}={given!r} must be one of {', '.join(choices)}")


def _check_parts(name: str, given: Any, kind: type) -> None:
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{name} is a {type(given).__name__}: give a list of {kind.__name__}s")
    for index, part in enumerate(given):
        if not isinstance(part, kind):
            raise ConfigError(f"{name}[{index}] is a {type(part).__name__}: give {kind.__name__}s")


def _check_count(name: str, given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name}={given!r} must be an integer of at least 1")


def _check_template(name: str, given: Any) -> None:
    if given is None:
        return
    if not isinstance(given, BasePromptTemplate):
        raise ConfigError(f"{name} is a {type(given).__name__}: give a PromptTemplate(...)")
    if not set(CONTEXT_VARIABLES) & set(given.template_vars):
        raise ConfigError(f"{name} must take 'context_str', not only {given.template_vars}")


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
