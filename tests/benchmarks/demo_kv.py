"""A sample of KV as a model really computes it, to measure what is done to KV by."""

from __future__ import annotations

from contextlib import closing

import torch

from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.quality.dataset import lead_text
from tests.toy import TOY
from tests.toy.questions import toy_dataset

SETTING, SEED = "adjacent", 1


def demo_kv(questions: int) -> ChunkKV:
    """Return the KV that the bundled model computes for the chunks of so many questions, as one."""
    data = toy_dataset([SETTING], questions, SEED)
    with closing(TransformersEngine(TOY, instruction=lead_text(data.instruction))) as engine:
        for question in data.questions:
            engine.precompute(question.documents, progress=False)
        found = engine.store.get_many(engine.store.keys())
    kvs = [lookup.kv for lookup in found if lookup.kv is not None]
    keys, values = (torch.cat([getattr(kv, part) for kv in kvs], 2) for part in ("keys", "values"))
    return ChunkKV(keys, values, 0)
