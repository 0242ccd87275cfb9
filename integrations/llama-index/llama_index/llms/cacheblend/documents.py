"""Nodes as documents of chunks: grouped by source document, in document order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo

from cacheblend_rag import ConfigError

AnyNode = TypeVar("AnyNode", bound=BaseNode)
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class SourceDocument:
    """Nodes cut from one document, in order; whole: no neighbour of theirs is missing."""

    document_id: str
    nodes: tuple[BaseNode, ...]
    whole: bool


def checked_nodes(nodes: Iterable[AnyNode], name: str = "nodes") -> list[AnyNode]:
    """Return nodes or documents as a list; raises ConfigError, naming the field, for others."""
    if isinstance(nodes, str | BaseNode) or not isinstance(nodes, Iterable):
        raise ConfigError(f"{name} is a {type(nodes).__name__}: give a list of {name}")
    found = list(nodes)
    for index, node in enumerate(found):
        if not isinstance(node, BaseNode):
            raise ConfigError(
                f"{name}[{index}] is a {type(node).__name__}: give LlamaIndex's {name}, such as "
                "SimpleDirectoryReader(...).load_data() returns"
            )
    return found


def shown_text(node: BaseNode) -> str:
    """Return the node's text with the metadata LLMs see, as synthesizers put it into prompts."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def bare_text(node: BaseNode) -> str:
    """Return the node's text without metadata, as citations and chat templates show it."""
    return node.get_content(metadata_mode=MetadataMode.NONE).strip()


def has_window(node: BaseNode) -> bool:
    """Whether metadata that LLMs do not see hold the node's text within a longer one.

    SentenceWindowNodeParser makes such nodes, and MetadataReplacementPostProcessor shows the longer
    text in place of the node's own: the sentences in it stand there bare.
    """
    text = bare_text(node)
    return bool(text) and any(text in one and one != text for one in _hidden_texts(node))


def shows_window(node: BaseNode) -> bool:
    """Whether the node's own text was replaced by one in metadata that LLMs do not see."""
    return bare_text(node) in _hidden_texts(node)


def _hidden_texts(node: BaseNode) -> list[str]:
    hidden = (node.metadata.get(key) for key in node.excluded_llm_metadata_keys)
    return [value.strip() for value in hidden if isinstance(value, str)]


def document_id(node: BaseNode) -> str:
    """Return the id of the document the node was cut from; its own when it stands alone."""
    return node.ref_doc_id or node.node_id


def source_documents(nodes: Iterable[BaseNode]) -> list[SourceDocument]:
    """Group nodes by source document; documents keep the order of their first nodes."""
    groups: dict[str, dict[str, BaseNode]] = {}
    for node in nodes:
        groups.setdefault(document_id(node), {})[node.node_id] = node
    return [
        SourceDocument(
            name,
            tuple(_in_order(group)),
            all(neighbour in group for node in group.values() for neighbour in _neighbours(node)),
        )
        for name, group in groups.items()
    ]


def _in_order(group: dict[str, BaseNode]) -> Iterator[BaseNode]:
    """Follow NEXT relations from every node without a predecessor here, earliest first."""
    done: set[str] = set()
    heads = [n for n in group.values() if _related(n, NodeRelationship.PREVIOUS) not in group]
    for head in [*_by_start(heads), *_by_start(list(group.values()))]:
        node: BaseNode | None = head
        while node is not None and node.node_id not in done:
            done.add(node.node_id)
            yield node
            node = group.get(_related(node, NodeRelationship.NEXT) or "")


def _by_start(nodes: Sequence[BaseNode]) -> list[BaseNode]:
    """Sort by character offset where every node has one; otherwise keep the given order."""
    starts = [start_index(node) for node in nodes]
    if any(start is None for start in starts):
        return list(nodes)
    return sorted(nodes, key=lambda node: start_index(node) or 0)


def start_index(node: BaseNode) -> int | None:
    """Return where the node's text starts in its document, if it is known."""
    start = getattr(node, "start_char_idx", None)
    return start if isinstance(start, int) else None


def _neighbours(node: BaseNode) -> list[str]:
    related = [_related(node, NodeRelationship.PREVIOUS), _related(node, NodeRelationship.NEXT)]
    return [node_id for node_id in related if node_id is not None]


def _related(node: BaseNode, relationship: NodeRelationship) -> str | None:
    related = node.relationships.get(relationship)
    return related.node_id if isinstance(related, RelatedNodeInfo) else None
