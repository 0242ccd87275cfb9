"""Runs one request several ways, and collects the evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.guard import as_served
from cacheblend_rag.engines.prepare import PreparedPrompt, TurnPrompt
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.observe.doctor.evidence import (
    Evidence,
    MemoryFacts,
    PromptFacts,
    TierFacts,
    Trial,
    waited,
)
from cacheblend_rag.observe.doctor.machine import CpuLoad, Machine
from cacheblend_rag.observe.doctor.quality import NOTICED
from cacheblend_rag.observe.doctor.similar import similar_chunks
from cacheblend_rag.observe.doctor.speed import MUCH_WORK
from cacheblend_rag.report import BlendReport
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.settings.options import DEFAULT_RATIO
from cacheblend_rag.text.chat import on_day
from cacheblend_rag.text.encoder import Segment
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.special_tokens import special_tokens

READS = 3
"""How often a tier is read once more, if a request waited for it."""
SUSPICIOUS = 0.3
"""Share of the first request that it waited for stored KV, from which on tiers are read again."""
LEAST_SECONDS = 0.5
"""Shortest time over which CPU counters, of 10 ms each, are compared."""
FIRST_RATIO = 2 * DEFAULT_RATIO
MOST_RATIO = 0.5
CHOOSES_NOTHING = ("all", "none")
"""Selectors without a ratio."""


@dataclass
class Measurement:
    """One request to an engine, about to be run.

    engine: serves it. prompt: prepared by this engine. config: in force. question: if known, of the
    prompt. runs: how often it is run both ways. answer_tokens: over how many predictions are
    compared. machine: whose counters are read. on_step: called with what is done next.
    """

    engine: Engine
    prompt: PreparedPrompt
    config: BlendConfig
    question: str
    runs: int
    answer_tokens: int
    machine: Machine
    on_step: Callable[[str], None]
    answer: tuple[int, ...] = field(default=(), init=False)

    def evidence(self) -> Evidence:
        """Run the request and return all facts; raises errors of requests but lack of memory."""
        store = getattr(self.engine, "store", None)
        store = store if isinstance(store, TieredKVStore) else None
        before = None if store is None else store.stats()
        cpu, began = self.machine.counters(), time.monotonic()
        found = self._requests(self._of_prompt())
        if found.is_blended and found.memory.lack is None:
            found = self._trials(found)
        if store is not None:
            time.sleep(max(0.0, LEAST_SECONDS - (time.monotonic() - began)))
            load = CpuLoad.between(cpu, self.machine.counters())
            found = replace(found, load=load)
            found = replace(found, tiers=self._tiers(store, before or {}, found))
            found = replace(found, memory=self._memory(store, found))
        return found

    def _of_prompt(self) -> Evidence:
        self.on_step("searching the prompt for registered chunks")
        engine, prompt = self.engine, self.prompt
        parts = _segments(engine, prompt)
        texts = [part.text for part in parts if part.chunk is None]
        known = engine.registry.chunks()
        special = special_tokens(engine.tokenizer).values()
        at = [index for index, part in enumerate(parts) if part.chunk is not None]
        after = "".join(part.text for part in parts[at[-1] + 1 :]) if at else ""
        for token in special:
            after = after.replace(token, " ")
        facts = PromptFacts(
            tokens=len(prompt.token_ids),
            chunks=tuple(span.chunk.text for span in prompt.encoded.spans),
            chunk_tokens=tuple(span.end - span.start for span in prompt.encoded.spans),
            known_chunks=len(known),
            before="".join(part.text for part in (parts[: at[0]] if at else parts)),
            after=after,
            instruction=on_day(None, engine.instruction, engine.tokenizer),
            lead_in=engine.lead_in.kind,
            question=self.question,
        )
        return Evidence(
            facts,
            self.config,
            similar=similar_chunks(texts, known),
            refusal=engine.blend_refusal,
        )

    def _requests(self, found: Evidence) -> Evidence:
        """Run the request by blend and by full prefill, in turn, after one of each."""
        blends: list[BlendReport] = []
        fulls: list[BlendReport] = []
        first: BlendReport | None = None
        lack: str | None = None
        try:
            self.on_step("the first blended request")
            own = self._generated(self.config, self.answer_tokens)
            first = own.report
            self.on_step("the first request by full prefill")
            full = self.engine.generate_full(self.prompt, _greedy(self.answer_tokens))
            # Full prefill of a prompt without its chunks' documents may answer from nothing.
            lacks_context = any(chunk.protected for chunk in self.prompt.placed)
            self.answer = (own if lacks_context else full).token_ids
            for run in range(self.runs):
                self.on_step(f"run {run + 1} of {self.runs}")
                blends.append(self._blended(self.config))
                fulls.append(self.engine.generate_full(self.prompt, _greedy(1)).report)
        except OutOfMemoryError as error:
            lack = str(error)
        return replace(
            found,
            first=first,
            blends=tuple(blends),
            fulls=tuple(fulls),
            memory=MemoryFacts(lack=lack),
        )

    def _trials(self, found: Evidence) -> Evidence:
        """Blend with the config in force and, where that helps to judge it, with others."""
        self.on_step("comparing predictions with full prefill's")
        now = self._trial(self.config)
        more = less = earlier = None
        if now.loss is not None and now.loss >= NOTICED and now.ratio < MOST_RATIO:
            self.on_step("the same at a higher ratio")
            more = self._trial(self._at(min(MOST_RATIO, max(FIRST_RATIO, 2 * now.ratio))))
        if now.ratio >= MUCH_WORK:
            self.on_step("the same at a lower ratio")
            less = self._trial(self._at(DEFAULT_RATIO))
        trace, checks = now.report.trace, self.config.check_layers
        if checks[0] > 1 and trace and any(one.layer is not None for one in trace.selections):
            self.on_step("the same with an earlier check layer")
            early = self.config.with_changes(check_layers=(1,), recompute_ratio=now.ratio)
            earlier = self._trial(early)
        return replace(found, in_force=now, more=more, less=less, earlier=earlier)

    def _at(self, ratio: float) -> BlendConfig:
        """Return the config in force with another ratio."""
        config = self.config.with_ratio(ratio)
        if config.selector in CHOOSES_NOTHING:
            own = BlendConfig()
            config = config.with_changes(selector=own.selector, selector_options={})
        return config

    def _trial(self, config: BlendConfig) -> Trial:
        report = self._blended(config.with_changes(trace=True, cost_model=False))
        told = self.engine.compare_with_full_prefill(
            self.prompt,
            self.answer,
            config=as_served(config, report.recompute_ratio),
            with_documents=True,
        )
        return Trial(config, report, told)

    def _blended(self, config: BlendConfig) -> BlendReport:
        return self._generated(config, 1).report

    def _generated(self, config: BlendConfig, tokens: int) -> Generation:
        # Without prefix caching: a run must not find what the one before has left.
        config = config.with_changes(reuse_prefix=False)
        return self.engine.generate(self.prompt, _greedy(tokens), config=config)

    def _tiers(
        self,
        store: TieredKVStore,
        before: Mapping[str, Mapping[str, int | None]],
        found: Evidence,
    ) -> dict[str, TierFacts]:
        """Return what happened to each tier, and how long it takes to read the chunks again."""
        keys = [chunk.key for chunk in self.prompt.placed]
        first = found.first
        waits = first is not None and (
            sum(waited(first).values()) >= SUSPICIOUS * first.seconds.time_to_first_token
        )
        read: dict[str, tuple[int, float | None]] = {}
        for tier in store.tiers:
            entries = tier.entry_many(keys)
            held = [key for key, one in zip(keys, entries, strict=True) if one is not None]
            size = sum(one.nbytes for one in entries if one is not None)
            seconds = None
            if waits and held and tier.durable:
                self.on_step(f"reading the chunks from the tier {tier.name} once more")
                seconds = median(_timed(tier, held) for _ in range(READS))
            read[tier.name] = (size, seconds)
        after = store.stats()
        return {
            name: TierFacts(
                errors=_grown(before, after, name, "errors"),
                skipped=_grown(before, after, name, "skipped"),
                read_bytes=size,
                read_seconds=seconds,
            )
            for name, (size, seconds) in read.items()
        }

    def _memory(self, store: TieredKVStore, found: Evidence) -> MemoryFacts:
        tokens = sum(found.prompt.chunk_tokens)
        stored = max((facts.read_bytes for facts in found.tiers.values()), default=0)
        needed = None
        if stored and tokens and store.precision == "native":
            needed = stored * len(self.prompt.token_ids) // tokens
        device = getattr(getattr(self.engine, "model", None), "device", None)
        stats = store.stats()
        kept = [stats[tier.name]["bytes"] or 0 for tier in store.tiers if not tier.durable]
        return replace(
            found.memory,
            needed=needed,
            available=self.machine.available_bytes(device),
            kept=sum(kept),
        )


def _segments(engine: Engine, prompt: PreparedPrompt) -> Sequence[Segment]:
    source = prompt.source.prompt if isinstance(prompt.source, TurnPrompt) else prompt.source
    if isinstance(source, BlendPrompt):
        return source.segments
    return BlendPrompt.from_text(prompt.text, engine.registry, prompt.hints).segments


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams.greedy(max_tokens=tokens, ignore_eos=True)


def _timed(tier: Tier, keys: Sequence[KVKey]) -> float:
    began = time.perf_counter()
    tier.get_many(keys)
    return time.perf_counter() - began


def _grown(
    before: Mapping[str, Mapping[str, int | None]],
    after: Mapping[str, Mapping[str, int | None]],
    tier: str,
    name: str,
) -> int:
    return (after[tier][name] or 0) - (before.get(tier, {}).get(name) or 0)
