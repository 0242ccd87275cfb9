"""EngineFront: what every engine does with texts before a model sees them."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.config import BlendConfig, LeadInConfig, check_request, settle
from cacheblend_rag.engines.base import CLOSED, Generation, PromptLike, SamplingParams
from cacheblend_rag.engines.misses import FirstMiss
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.report import ChunkReport, MissReason
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.encoder import SegmentEncoder, Tokenizer
from cacheblend_rag.text.prompt import BlendPrompt, EncodedPrompt
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

Item = Chunk | Document | str


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt ready to be served.

    unmatched: chunks that do not stand in it as such. max_tokens: as asked, within the window.
    text: the prompt. expects_chunks: whether known or hinted chunks are to stand in it.
    """

    prompt: EncodedPrompt
    unmatched: tuple[ChunkReport, ...]
    max_tokens: int
    prepare_seconds: float
    text: str
    expects_chunks: bool


COMPARED = 8
FORGOTTEN = "forgotten meanwhile"
"""Of chunks whose KV was dropped again, as another writer no longer has them."""


class EngineFront(ABC):
    """Known chunks, tokens and lead-ins of one engine."""

    def __init__(
        self,
        tokenizer: Any,
        config: BlendConfig | None,
        registry: ChunkRegistry | None,
        instruction: str | Callable[[Tokenizer], str],
        lead_in: LeadInConfig | str | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config, self.lead_in = settled(config, lead_in)
        self.encoder = SegmentEncoder(
            tokenizer, split_special_tokens=self.lead_in.split_special_tokens
        )
        if self.encoder.cuts == "nowhere":
            logger.warning("the tokenizer needs whole texts: no chunk can be reused in a prompt")
        self.registry = ChunkRegistry() if registry is None else registry
        self.instruction = instruction if isinstance(instruction, str) else instruction(tokenizer)
        self._first_miss = FirstMiss(self.registry)
        self._lead_in: LeadIn

    @property
    @abstractmethod
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""

    @property
    def fingerprint(self) -> str:
        """What this engine's chunk KV is stored under: model, tokenizer, lead-in, namespace."""
        return self._lead_in.fingerprint

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` as a chunk; raises PromptError on unpaired surrogates."""
        return self.encoder.chunk(text)

    def register(self, items: Iterable[Item]) -> None:
        """Make chunks known without computing anything; raises PromptError on empty text."""
        self._check_open()
        self.registry.add_many([chunk for item in items for chunk in chunks_of(item)])

    def _register_current(
        self, items: Iterable[Item], refused: Counter[str]
    ) -> tuple[list[Chunk], int]:
        """Register items, and drop the KV of what newer versions of documents no longer hold.

        Returns the chunks, and of how many KV was dropped.
        """
        self._check_open()
        given: list[Chunk] = []
        documents: dict[tuple[str, str], None] = {}
        for item in items:
            for chunk in chunks_of(item):
                if chunk.text.strip():
                    given.append(chunk)
                else:
                    refused["empty text"] += 1
            if isinstance(item, Document):
                documents[item.document_id, item.collection] = None
        current = set(given)
        stale = [c for one in documents for c in self.registry.document(*one) if c not in current]
        if stale:
            self.registry.discard_many(stale)
        self.registry.add_many(given)
        replaced = self._drop(stale)
        if replaced:
            log_replaced(replaced, stale, given)
        return given, replaced

    def evict_document(self, document_id: str, collection: str | None = None) -> int:
        """Forget a document's chunks and drop their KV; returns how many were dropped.

        collection: only what was cut for it; None is all. KV goes first: on a full disk, forgetting
        needs the room that it leaves. Raises StoreError when the registry cannot be written.
        """
        self._check_open()
        self.registry.refresh()
        chunks = self.registry.document(document_id, collection)
        dropped = self._drop(chunks, besides=frozenset(chunks))
        self.registry.discard_many(chunks)
        return dropped + self._drop(chunks)  # what others stored of it in between

    def _drop(self, chunks: Iterable[Chunk], besides: Collection[Chunk] = ()) -> int:
        """Drop the KV of those chunks that no registered chunk shares, ``besides`` left out."""
        return self._evict([chunk for chunk in chunks if not self._is_shared(chunk, besides)])

    @abstractmethod
    def _evict(self, chunks: Sequence[Chunk]) -> int:
        """Drop the KV of chunks; returns of how many there was any."""

    def _drop_forgotten(self, chunks: Iterable[Chunk]) -> int:
        """Drop the KV of those chunks, just stored, that another writer has forgotten meanwhile.

        Nobody else would: the other one dropped what there was before it was stored.
        """
        self.registry.refresh()
        return self._drop(chunks)

    def _is_shared(self, chunk: Chunk, besides: Collection[Chunk]) -> bool:
        key = self._lead_in.key(chunk)
        variants = self.registry.variants(chunk.text)
        return any(self._lead_in.key(one) == key for one in variants if one not in besides)

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether ``close`` has yet to be called."""

    def _check_open(self) -> None:
        """Raise ConfigError once the engine is closed."""
        if not self.is_open:
            raise ConfigError(CLOSED)

    def _hinted(self, hints: Iterable[Chunk | str]) -> list[Chunk]:
        """Return hinted chunks, and all chunks of documents that are hinted by their id."""
        self._check_open()
        return [
            chunk
            for hint in hints
            for chunk in (self.registry.document(hint) if isinstance(hint, str) else (hint,))
        ]

    def _prepare_prompt(
        self, prompt: PromptLike, sampling: SamplingParams, hints: Sequence[Chunk | str]
    ) -> PreparedPrompt:
        """Segment and tokenize; raises PromptError when it is empty or too long."""
        self._check_open()
        started = time.perf_counter()
        segmented = self._segments(prompt, hints)
        encoded = segmented.encode(self.encoder)
        room = self.context_window - len(encoded.token_ids)
        if not segmented.segments or not encoded.token_ids:
            raise PromptError("prompt is empty: give at least one token")
        if room < 1:
            raise PromptError(
                f"prompt holds {len(encoded.token_ids)} tokens, the context window is "
                f"{self.context_window}: retrieve fewer chunks or shorten the question"
            )
        return PreparedPrompt(
            encoded,
            tuple(self._unmatched(encoded, hints)),
            min(sampling.max_tokens, room),
            time.perf_counter() - started,
            segmented.text,
            bool(hints or encoded.spans),
        )

    def _segments(self, prompt: PromptLike, hints: Sequence[Chunk | str]) -> BlendPrompt:
        if isinstance(prompt, BlendPrompt):
            return prompt
        if isinstance(prompt, str):
            return BlendPrompt.from_text(prompt, self.registry, hints)
        return BlendPrompt.from_messages(prompt, self.registry, self.tokenizer, hints)

    def _unmatched(self, prompt: EncodedPrompt, hints: Sequence[Chunk | str]) -> list[ChunkReport]:
        """Report chunks that do not stand in the prompt by themselves, or not word for word."""
        present = {span.chunk.text for span in prompt.spans}
        present |= {chunk.text for chunk in prompt.inseparable}
        reports = [self._missed(chunk, "inseparable") for chunk in prompt.inseparable]
        for hint in hints:
            if isinstance(hint, str) or hint.text in present:
                continue
            reason: MissReason = "altered text" if hint.text in self.registry else "unknown"
            reports.append(self._missed(hint, reason))
        return reports

    def _told(self, prepared: PreparedPrompt, answer: Generation) -> Generation:
        """Return the answer; when nothing was reused where it should have been, that is logged."""
        self._first_miss.see(prepared.text, prepared.expects_chunks, answer)
        return answer

    def _missed(self, chunk: Chunk, reason: MissReason) -> ChunkReport:
        key = self._lead_in.key(chunk)
        return ChunkReport(key.chunk_id, -1, 0, False, reason, document_id=chunk.document_id)


def settled(
    config: BlendConfig | None, lead_in: LeadInConfig | str | None
) -> tuple[BlendConfig, LeadInConfig]:
    """Return an engine's settings, as ``settle`` does; raises ConfigError for a wrong selector."""
    config, lead_in = settle(config, lead_in)
    return checked(config), lead_in


def checked(config: BlendConfig | None) -> BlendConfig:
    """Return a request's config, or the default one.

    Of what a config holds, the rest is checked when it is made. Raises ConfigError when its
    selector is none, or when it tells what is an engine's.
    """
    config = check_request(config or BlendConfig())
    make_selector(config.selector, config.selector_options)
    return config


def chunks_of(item: Item) -> list[Chunk]:
    """Return the chunks of what may be given to precompute and register."""
    if isinstance(item, Document):
        return item.to_chunks()
    return [Chunk(item) if isinstance(item, str) else item]


def log_replaced(replaced: int, old: Sequence[Chunk], new: Sequence[Chunk]) -> None:
    """Say that chunks with KV were replaced; as a warning where an index may still hold them."""
    if _is_cut_otherwise(old, new):
        logger.warning(
            "%d chunks were replaced by smaller or larger pieces of the same documents: an index "
            "that is to keep its own needs a collection= of its own",
            replaced,
        )
    else:
        logger.info("%d chunks of changed documents were replaced", replaced)


def _is_cut_otherwise(old: Sequence[Chunk], new: Sequence[Chunk]) -> bool:
    """Whether a piece of either kind holds several of the other; a few old ones tell."""
    for one in old[:COMPARED]:
        texts = {c.text for c in new if c.document_id == one.document_id} - {one.text}
        siblings = {c.text for c in old if c.document_id == one.document_id}
        larger = next((text for text in texts if one.text in text), "")
        if sum(text in one.text for text in texts) > 1 or sum(s in larger for s in siblings) > 1:
            return True
    return False
