"""Computes chunk KV after its lead-in at index time, and each chunk's prior.

Chunks that need no document are computed in padded batches. A document is computed in one pass and
sliced into its chunks; its chunks that are stored already enter the pass as cached KV, so
editing a document recomputes only what follows the edit. No pass holds more than two layers.

The prior of a token is the squared deviation of its key in the first layer that depends on other
tokens, between the chunk after its lead-in alone and the chunk in its document, over the mean
squared length of the chunk's keys there. The version that is not computed anyway is run up to that
layer only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cacheblend_rag.blend import BlendPass, FusedKV, RingKV
from cacheblend_rag.blend.copy_stream import pinned_buffers_of
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.blend.rows import token_tensor
from cacheblend_rag.blend.schedule import REUSE_ONLY
from cacheblend_rag.blend.stack import DecoderStack, Geometry, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.blend.transfer import Download, to_host, until
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import Lack, unless_lacking
from cacheblend_rag.prefill.chunk_loader import ChunkLoader, LostChunkError, begin_reading
from cacheblend_rag.prefill.lead_in import ChunkPlan, PlacedChunk

PRIOR_LAYER = 1
"""The first layer whose keys depend on other tokens: comparing there costs about one layer."""

Member = tuple[ChunkPlan, int]
"""A chunk of a document, and its first position in the document's pass."""


@dataclass(frozen=True)
class NoRoom:
    """Chunks that were not computed for lack of memory; lack: one line about it."""

    chunks: Sequence[ChunkPlan]
    lack: str


Result = tuple[ChunkPlan, ChunkKV] | NoRoom | None
Computed = Iterator[Result]
"""Computed chunks; None after each layer, when other work may run."""

ComputeAlone = Callable[[list[ChunkPlan]], Computed]
"""Computes chunks after their lead-in only, without a prior."""


@dataclass
class DocumentPlan:
    """One run over lead-in and document tokens, and the chunks sliced from it."""

    tokens: list[int]
    members: list[Member] = field(default_factory=list)

    def takes(self, chunk: ChunkPlan) -> bool:
        """Add the chunk if its lead-in continues this pass; returns whether it was added."""
        before = [*chunk.lead, *chunk.context]
        if before[: len(self.tokens)] != self.tokens:
            return False
        self.tokens = [*before, *chunk.token_ids]
        self.members.append((chunk, len(before)))
        return True


def document_plans(chunks: Iterable[ChunkPlan]) -> list[DocumentPlan]:
    """Group chunks, each document's in order, into as few passes as their contexts allow."""
    passes: list[DocumentPlan] = []
    for chunk in chunks:
        if not passes or not passes[-1].takes(chunk):
            passes.append(DocumentPlan([]))
            passes[-1].takes(chunk)
    return passes


def compute_chunks(
    stack: DecoderStack,
    chunks: Iterable[ChunkPlan],
    store: TieredKVStore,
    *,
    alone: ComputeAlone,
    in_document: bool,
    leaves_out: bool = False,
) -> Computed:
    """Yield the KV and prior of every chunk not in ``store``, ready for its ``put``.

    in_document: chunks are computed in their document (lead-in ``document``), as turns of
    conversations always are; otherwise after the lead-in alone, and the document is used only for
    the prior. leaves_out: lack of memory
    gives a NoRoom instead of an error; not allowed if other ranks wait for this one.
    """

    def spared(missing: Sequence[ChunkPlan], work: Computed) -> Computed:
        work = as_stored(stack, store, work)
        return or_no_room(missing, work) if leaves_out else work

    unrelated: list[ChunkPlan] = []
    for work in document_plans(chunks):
        missing = [chunk for chunk, _ in _split(stack, work.members, store)[0]]
        if not any(chunk.context for chunk, _ in work.members):
            unrelated += missing
        elif in_document or work.members[0][0].is_turn:
            yield from spared(missing, compute_document(stack, work, store))
        elif missing:
            yield from spared(missing, _with_prior(stack, work, alone(missing)))
    yield from spared(unrelated, alone(unrelated))


def as_stored(stack: DecoderStack, store: TieredKVStore, computed: Computed) -> Computed:
    """Yield computed chunks, ready for ``store.put``: for ``int4``, keys are rotated to position 0.

    Keys are changed in place.
    """
    for done in computed:
        if store.precision != "int4" or done is None or isinstance(done, NoRoom):
            yield done
            continue
        chunk, kv = done
        turn = stack.rotation(1).per_token(kv.position).inverse()
        for layer in range(kv.shape[0]):  # on the device, one at a time
            keys = kv.keys[layer : layer + 1]
            keys.copy_(rotated(keys.to(turn.cos.device), turn.of(layer)))
        yield chunk, kv


def or_no_room(chunks: Sequence[ChunkPlan], work: Computed) -> Computed:
    """Compute chunks; when memory runs out, the remaining ones become a NoRoom.

    The memory of the work is freed by then.
    """
    left = {chunk.key: chunk for chunk in chunks}

    def counted() -> Generator[Result]:
        for computed in work:
            told = computed.chunks if isinstance(computed, NoRoom) else (computed or ())[:1]
            for chunk in told:
                left.pop(chunk.key, None)
            yield computed

    done = yield from unless_lacking(counted())
    if isinstance(done, Lack):
        yield NoRoom(list(left.values()), done.why)


def _split(
    stack: DecoderStack, members: Sequence[Member], store: TieredKVStore
) -> tuple[list[Member], list[Member]]:
    """Return the members that some rank lacks, and those that all ranks have stored."""
    stored = on_all_ranks(stack, store.contains_many(chunk.key for chunk, _ in members))
    pairs = list(zip(members, stored, strict=True))
    return [one for one, found in pairs if not found], [one for one, found in pairs if found]


def _with_prior(stack: DecoderStack, work: DocumentPlan, alone: Computed) -> Computed:
    """Add the prior from their document to chunks that are computed after their lead-in alone."""
    starts = {chunk.key: start for chunk, start in work.members}
    contextual = yield from keys_of_prior_layer(stack, work.tokens)
    for computed in alone:
        if computed is None or isinstance(computed, NoRoom):
            yield computed
            continue
        chunk, kv = computed
        start = starts[chunk.key]
        there = contextual[:, start : start + kv.tokens]
        here = kv.keys[prior_layer(stack)].to(there.device)
        moved = context_deviation(stack, here, there, start - kv.position)
        prior = yield from to_host(stack, moved)
        yield chunk, replace(kv, prior=prior)


def compute_document(stack: DecoderStack, work: DocumentPlan, store: TieredKVStore) -> Computed:
    """Run one document pass; yield the KV and prior of every member not in ``store``.

    Keys are at the document's positions: see ``as_stored``.
    Stored members that turn out to be unreadable are computed, too.
    """
    missing, stored = _split(stack, work.members, store)
    if not missing:
        return
    end = missing[-1][1] + len(missing[-1][0].token_ids)
    ids = token_tensor(work.tokens[:end], stack.geometry.device)
    earlier = [member for member in stored if member[1] < end]
    placed = [
        PlacedChunk(chunk.key, start, start + len(chunk.token_ids)) for chunk, start in earlier
    ]
    cut: list[tuple[Member, ChunkKV]] | None = None
    with begin_reading(store, placed, stack, promote=False) as source:
        loader = ChunkLoader(stack, placed, source)
        yield from loader.find()
        loader.into(RingKV(stack.geometry, end))
        while cut is None:
            pairs = zip(earlier, loader.chunks, strict=True)
            lost = [member for member, chunk in pairs if not chunk.is_used]
            cut = yield from _cut_out(stack, ids, [*missing, *lost], loader)
    for (chunk, start), kv in cut:
        prior = torch.zeros(kv.tokens)
        if chunk.context:
            lead = len(chunk.lead)
            alone = yield from keys_of_prior_layer(stack, [*chunk.lead, *chunk.token_ids])
            there = kv.keys[prior_layer(stack)].to(stack.geometry.device)
            moved = context_deviation(stack, alone[:, lead:], there, start - lead)
            prior = yield from to_host(stack, moved)
        yield chunk, replace(kv, prior=prior)


def compute_one_by_one(
    stack: DecoderStack, chunks: Sequence[ChunkPlan], store: TieredKVStore
) -> Computed:
    """Compute chunks after their lead-in only, each in its own pass, without a prior.

    Chunks in ``store`` are left out.
    """
    missing, _ = _split(stack, [(chunk, len(chunk.lead)) for chunk in chunks], store)
    for member in missing:
        chunk, _ = member
        ids = token_tensor([*chunk.lead, *chunk.token_ids], stack.geometry.device)
        for _, kv in (yield from _cut_out(stack, ids, [member])) or ():
            yield chunk, kv


def _cut_out(
    stack: DecoderStack, ids: Tensor, members: Sequence[Member], loader: ChunkLoader | None = None
) -> Generator[None, None, list[tuple[Member, ChunkKV]] | None]:
    """Run a pass that computes all tokens but those of stored chunks; cut some chunks out of it.

    loader: of the stored chunks. Returns None when one of them was lost meanwhile.
    """
    fused = RingKV(stack.geometry, ids.numel()) if loader is None else loader.fused
    candidates = Candidates.none(ids.numel())
    for chunk in () if loader is None else loader.used:
        candidates.cached[chunk.here] = True
    cut = Cut(stack.geometry, [(at, at + len(chunk.token_ids)) for chunk, at in members])

    def before(layer: int) -> Steps[None]:
        yield from cut.asked(stack)
        if loader is not None:
            yield from loader.load(layer)

    run = BlendPass(
        stack, ids, fused, candidates, REUSE_ONLY,
        last=0, before_layer=before, on_layer=cut.take,
    )  # fmt: skip
    try:
        yield from run.steps()
    except LostChunkError:
        cut.leave()
        return None
    yield from cut.arrived(stack)
    return list(zip(members, cut.chunks(), strict=True))


class Cut:
    """Copies chunks out of a pass into host memory, each layer as it becomes final.

    spans: their positions. On a GPU layers are copied on the copy stream, and a separate thread
    waits for them.
    """

    def __init__(self, geometry: Geometry, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        layers, kv_heads, head_dim = geometry.layers, geometry.kv_heads, geometry.head_dim
        self._cut = [
            torch.empty(layers, 2, kv_heads, end - start, head_dim, dtype=geometry.dtype)
            for start, end in spans
        ]
        buffers = pinned_buffers_of(geometry.device)
        self._download = None if buffers is None else Download(buffers)

    def take(self, layer: int, fused: FusedKV) -> None:
        """Copy a layer's part of each chunk."""
        parts = [
            (part, whole[:, start:end])
            for kv, (start, end) in zip(self._cut, self._spans, strict=True)
            for part, whole in zip(kv[layer], fused.of_layer(layer), strict=True)
        ]
        if self._download is not None:
            self._download.add(parts)
            return
        for part, whole in parts:
            part.copy_(whole)

    def asked(self, stack: DecoderStack) -> Steps[None]:
        """Yield until all copies so far are queued on the device, before the next layer."""
        if self._download is not None:
            yield from until(stack, self._download.go_on)

    def arrived(self, stack: DecoderStack) -> Steps[None]:
        """Yield until all copies have arrived."""
        if self._download is not None:
            yield from until(stack, self._download.is_done)

    def leave(self) -> None:
        """Release the pass's buffer; copies that have not arrived are dropped."""
        if self._download is not None:
            self._download.leave()

    def chunks(self) -> list[ChunkKV]:
        """Return the chunks, without a prior."""
        return [ChunkKV(kv, start) for kv, (start, _) in zip(self._cut, self._spans, strict=True)]


def prior_layer(stack: DecoderStack) -> int:
    """Return PRIOR_LAYER, or the only layer of a one-layer model."""
    return min(PRIOR_LAYER, stack.geometry.layers - 1)


def keys_of_prior_layer(stack: DecoderStack, tokens: Sequence[int]) -> Steps[Tensor]:
    """Return the keys (kv_heads, tokens, head_dim) of PRIOR_LAYER, running only earlier layers.

    tokens: the whole sequence from position 0. Yields after each block of rows.
    """
    ids = token_tensor(tokens, stack.geometry.device)
    layers = prior_layer(stack) + 1
    fused = FusedKV(replace(stack.geometry, layers=layers), ids.numel())
    nothing = Candidates.none(ids.numel())
    run = BlendPass(stack, ids, fused, nothing, REUSE_ONLY, last=0, layers=layers)
    yield from run.steps()
    return fused.keys[-1]


def context_deviation(stack: DecoderStack, alone: Tensor, contextual: Tensor, by: int) -> Tensor:
    """Return the prior, (tokens,) float32: how much a chunk's document changes its keys.

    It is the squared change of a token's key over the chunk's mean squared length of a key, so that
    it can be compared between models: 1 is a change as large as a key.
    alone, contextual: keys (kv_heads, tokens, head_dim) of PRIOR_LAYER, computed after the lead-in
    only and in the document. by: offset of the chunk's position in the document.
    """
    moved = rotated(alone[None], stack.rotation(by).of(prior_layer(stack)))[0]
    change = stack.all_reduce((moved.float() - contextual.float()).square().sum((0, 2)), "sum")
    length = stack.all_reduce(contextual.float().square().sum((0, 2)), "sum").mean()
    return change / length.clamp_min(torch.finfo(torch.float32).tiny)
