"""Nodes as documents of chunks: grouped by source document, in document order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo

SEPARATOR = "\n\n"


@dataclass(frozen=True)
class SourceDocument:
    """Nodes cut from one document, in order; whole: no neighbour of theirs is missing."""

    document_id: str
    nodes: Sequence[BaseNode]
    whole: bool


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
    """Group nodes by source document; documents keep the order of their first nodes.

    Nodes are in the order of their characters where all have a place, and else as they are given.
    """
    groups: dict[str, dict[str, BaseNode]] = {}
    for node in nodes:
        groups.setdefault(document_id(node), {})[node.node_id] = node
    found = []
    for name, group in groups.items():
        placed = [
            (start, node) for node in group.values() if (start := start_index(node)) is not None
        ]
        ordered = list(group.values())
        if len(placed) == len(group):
            ordered = [node for _, node in sorted(placed, key=lambda one: one[0])]
        is_whole = all(name in group for node in ordered for name in _neighbours(node))
        found.append(SourceDocument(name, ordered, is_whole))
    return found


def start_index(node: BaseNode) -> int | None:
    """Return where the node's text starts in its document, if it is known."""
    start = getattr(node, "start_char_idx", None)
    return start if isinstance(start, int) else None


def _neighbours(node: BaseNode) -> list[str]:
    beside = (NodeRelationship.PREVIOUS, NodeRelationship.NEXT)
    related = [node.relationships.get(relationship) for relationship in beside]
    return [one.node_id for one in related if isinstance(one, RelatedNodeInfo)]
