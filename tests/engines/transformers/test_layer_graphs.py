"""Layers on padded rows: what a CUDA graph of them computes, in Triton's interpreter."""

from __future__ import annotations

from tests.blend.kernels.interpreter import run_interpreted


def test_padded_rows_get_what_rows_get() -> None:
    run_interpreted("tests/engines/transformers/interpreted_layer_graphs.py")
