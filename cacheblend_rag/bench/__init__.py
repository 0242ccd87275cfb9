"""Benchmarks, one a file: what is measured against what, in turn, on the same machine."""
