"""What an engine in this process has stored, found in the tokens of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.catalog import Catalog, ComputedRun
from cacheblend_rag.engines.catalog_places import open_place
from cacheblend_rag.engines.finder import Finder
from cacheblend_rag.engines.found_chunk import Vocabulary
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.kv.chunk_kv import KVKey, fingerprint
from cacheblend_rag.kv.mac import mac_of
from cacheblend_rag.prefill.conversation_kv import turn_fingerprint
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadIn, LeadInId, PlacedChunk
from cacheblend_rag.prefill.precompute import document_plans
from cacheblend_rag.settings.tier_url import TierUrl


class StoredChunks:
    """Finds stored chunks, and conversations' turns, for one lead-in of an engine.

    finder: knows their tokens; engines around one store have one.
    """

    def __init__(self, finder: Finder, led: LeadIn) -> None:
        self._finder, self._led = finder, led

    def find(self, prompt: PreparedPrompt) -> Sequence[PlacedChunk]:
        """Return the parts of chunks and turns in a prompt, but for its stored placed chunks."""
        led, conversation, key = self._led, prompt.conversation, prompt.conversation_key
        if conversation is not None and not self._finder.knows(led.namespace, key):
            for plans in conversation.plans(turn_fingerprint(led.fingerprint)):
                self.learn(plans, led.id, key)  # it was resumed
        found = self._finder.find(
            led.namespace,
            prompt.token_ids,
            taken=[
                (chunk.start, chunk.end)
                for chunk in prompt.placed
                if self._finder.has(led.namespace, led.id, chunk.key)
            ],
            conversation=key,
            until=prompt.question_start,
        )
        return [
            one.placed(self.fingerprint(one.name.lead_in, of_turns=one.is_turn)) for one in found
        ]

    def fingerprint(self, lead_in: LeadInId, *, of_turns: bool) -> str:
        """Return the fingerprint of chunks computed after a lead-in, or of conversations' turns."""
        whole = lead_in.fingerprint(self._led.identity, self._led.namespace)
        return turn_fingerprint(whole) if of_turns else whole

    def learn(self, plans: Sequence[ChunkPlan], lead_in: LeadInId, conversation: str) -> None:
        """Have chunks found in prompts from now on; conversation: the key of their one, or ""."""
        for run in document_plans(plans):
            self._finder.learn(
                self._led.namespace,
                ComputedRun(
                    lead_in,
                    run.tokens,
                    [(start, start + len(plan.token_ids)) for plan, start in run.members],
                    [(plan.key.chunk_id, plan.key.context_id) for plan, _ in run.members],
                    context_start=len(run.members[0][0].lead),
                    conversation=conversation,
                ),
            )
        self._finder.settle()

    def forget(self, keys: Iterable[KVKey], lead_in: LeadInId, conversation: str = "") -> None:
        """Have evicted chunks found no more."""
        names = {(key.chunk_id, key.context_id) for key in keys}
        self._finder.forget(self._led.namespace, lead_in, names, conversation)


def finder_of(
    where: Path | TierUrl | None,
    identity: Mapping[str, Any],
    tokenizer: Any,
    *,
    read_only: bool,
    **options: bool,
) -> Finder:
    """Return the finder of an engine in this process.

    where: keeps what it knows; None is this process' memory. options: of the Finder.
    """
    model = fingerprint(identity, "")

    def opened() -> Catalog:
        assert where is not None  # noqa: S101 (else it is not called)
        return Catalog(open_place(where, model), mac_of(), read_only=read_only)

    vocabulary = partial(Vocabulary.of, tokenizer)
    return Finder(opened if where else None, vocabulary=vocabulary, **options)
