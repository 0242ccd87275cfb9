"""Benchmark of a GPU: each step measures one thing, in a process of its own."""
