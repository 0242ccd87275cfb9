"""The installed benchmarks, one per file."""
