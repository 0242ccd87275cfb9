"""Benchmarks that only developers run, as ``python -m tests.benchmarks.NAME``."""
