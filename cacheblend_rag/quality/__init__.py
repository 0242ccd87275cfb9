"""Measures answer quality: datasets, metrics, and the evaluation loop."""
